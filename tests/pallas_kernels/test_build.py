"""Compiling C++ kernels on first use: stored, shared, and reported if it fails."""

from __future__ import annotations

import logging
import os
import queue
import shutil
import subprocess
import sys
from functools import partial
from logging.handlers import QueueHandler
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.kernels import build, cpu_targets, paged_attention
from jaxserve.kernels.paged_attention.shapes import TEST_SHAPES, make_inputs


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PALLAS_KERNELS_CACHE", str(folder))
    return folder


@pytest.fixture
def small(cache, tmp_path):
    """A source that compiles quickly."""
    source = tmp_path / "kernels" / "small.cc"
    source.parent.mkdir()
    source.write_text('extern "C" int answer() { return 42; }')
    return source


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """A script that calls the compiler and records each run as a line in a file beside it."""
    real = shutil.which(os.environ.get("CXX", "c++"))
    script = tmp_path / "c++"
    script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/runs\nexec {real} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return script


def test_a_kernel_is_compiled_once_a_machine(small, cache, compiler):
    """The second call uses the library without a compiler run; no other files remain."""
    library = build.compile_library(small)
    assert list(cache.iterdir()) == [library]
    assert build.compile_library(small) == library
    runs = (compiler.parent / "runs").read_text().splitlines()
    assert sum(str(small) in run for run in runs) == 1


def check_without_a_compiler() -> None:
    """Return the implementation and messages of a process that has loaded no kernel."""
    said = queue.SimpleQueue()
    logging.getLogger("jaxserve.kernels").addHandler(QueueHandler(said))
    inputs = q, k_pages, v_pages, rows = make_inputs(TEST_SHAPES[3], seed=0)
    got = jax.jit(partial(paged_attention, layer=1, rows=rows))(q, k_pages, v_pages)
    assert "no C++ compiler" in said.get_nowait().getMessage()
    wanted = paged_attention(*inputs[:3], 1, rows, implementation="xla")
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    with pytest.raises(NotImplementedError, match="install one"):
        paged_attention(*inputs[:3], 1, rows, implementation="cpu")


@pytest.mark.release
def test_without_a_compiler_xla_serves_and_a_warning_says_why(cache, tmp_path):
    """XLA is chosen instead; requesting the kernel by name is an error with a remedy."""
    environment = {**os.environ, "PATH": str(tmp_path)}
    environment.pop("CXX", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.pallas_kernels.test_build"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_failing_compiler_is_quoted(cache, tmp_path):
    """A source that does not compile raises with the compiler's output; no files remain."""
    source = tmp_path / "broken.cc"
    source.write_text("int main( {")
    with pytest.raises(NotImplementedError, match="error"):
        build.compile_library(source)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("damage", ["cut", "emptied", "changed"])
def test_a_damaged_library_is_compiled_again(small, damage):
    """A truncated library is not loaded but replaced by a whole one, which serves."""
    library = build.compile_library(small)
    content = library.read_bytes()
    half = len(content) // 2
    damaged = {"cut": content[:half], "emptied": b"", "changed": content[:half] + bytes(half)}
    library.write_bytes(damaged[damage])
    again, answer = build.load_symbol(small, "answer")
    assert again == library and answer() == 42
    assert len(library.read_bytes()) == len(content)
    assert list(library.parent.iterdir()) == [library]


def test_a_library_that_others_may_have_written_is_not_loaded(small, caplog):
    """A library is code: it is compiled again, and the new one is this user's alone."""
    library = build.compile_library(small)
    library.chmod(0o777)
    with caplog.at_level(logging.WARNING, "jaxserve.kernels"):
        assert build.compile_library(small) == library
    assert "this user alone" in caplog.text
    assert not library.stat().st_mode & 0o022


def test_a_folder_that_others_can_write_to_is_not_used(small, cache, caplog):
    """Kernels go to a folder of this process, and the log says why."""
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    with caplog.at_level(logging.WARNING, "jaxserve.kernels"):
        library = build.compile_library(small)
    assert library.parent != cache and not list(cache.iterdir())
    assert "this user alone" in caplog.text
    shutil.rmtree(library.parent)


def test_a_library_without_the_symbol_is_compiled_again(small, caplog):
    """Another library at the same path is replaced, although the process has loaded it."""
    other = small.with_name("other.cc")
    other.write_text('extern "C" int question() { return 0; }')
    library = build.compile_library(small)
    shutil.move(build.compile_library(other), library)
    with caplog.at_level(logging.WARNING, "jaxserve.kernels"):
        assert build.load_symbol(small, "answer")[1]() == 42
    assert "compiling small.cc again" in caplog.text


def test_a_library_that_never_loads_is_refused_by_name(small):
    """After one more compilation the error names the library, in every call."""
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"kernels-small-\w+\.so cannot be loaded"):
            build.cpu_target(small, "no_such_symbol")


def test_another_compiler_version_compiles_again(small, monkeypatch, tmp_path):
    """A compiler is identified by its version output, not by its path."""
    real = shutil.which(os.environ.get("CXX", "c++"))
    compiler = tmp_path / "c++"
    monkeypatch.setenv("CXX", str(compiler))
    libraries = set()
    for said in ("1.0", "2.0", "2.0"):
        compiler.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo {said} && exit\nexec {real} "$@"\n'
        )
        compiler.chmod(0o755)
        libraries.add(build.compile_library(small))
    assert len(libraries) == 2


@pytest.fixture
def handler(cache, tmp_path):
    """A real handler that no other test registers."""
    source = tmp_path / "zeros.cc"
    source.write_text(cpu_targets.ZEROS[0].read_text() + f"// {tmp_path}")
    return source, "Zeros", ()


def test_names_are_known_before_anything_is_compiled(cache, handler):
    """They are those under which kernels are registered, and no library is made for them."""
    names = cpu_targets.target_names([handler])
    assert not list(cache.glob("*.so"))
    assert (build.cpu_target(*handler),) == names


def test_what_an_executable_calls_is_registered(cache, handler):
    """A kernel that it names is compiled; one that is not there is an error."""
    name = build.target_name(*handler)
    cpu_targets.register_called(b"no kernels", [handler])
    with pytest.raises(NotImplementedError, match="Zeros.0123456789abcdef, which is not there"):
        cpu_targets.register_called(b"pallas_kernels.Zeros.0123456789abcdef", [handler])
    assert not list(cache.glob("*.so"))
    cpu_targets.register_called(f"one {name}, another {name}".encode(), [handler])
    assert [path.stem[-16:] for path in cache.glob("*.so")] == [name[-16:]]


def test_a_kernel_that_could_not_be_used_has_no_name(small, cache):
    """Executables of later processes are then those without it, until it can be used again."""
    assert build.target_name(small, "no_such_symbol").startswith("pallas_kernels.no_such_symbol.")
    with pytest.raises(NotImplementedError):
        build.cpu_target(small, "no_such_symbol")
    with pytest.raises(NotImplementedError, match="small.cc could not be used"):
        build.target_name(small, "answer")
    (failure,) = cache.glob("*.failed")
    failure.unlink()
    assert build.target_name(small, "answer")


if __name__ == "__main__":
    check_without_a_compiler()
