"""Compiling C++ kernels on first use: kept, shared, and announced when it cannot be done."""

from __future__ import annotations

import logging
import shutil
from functools import partial

import jax
import numpy as np
import pytest

from pallas_kernels import build, paged_attention
from pallas_kernels.paged_attention import cpu
from pallas_kernels.paged_attention.shapes import TEST_SHAPES, make_inputs


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has loaded nothing, with an empty cache folder."""
    monkeypatch.setenv("PALLAS_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_targets", {})
    return tmp_path


def test_a_kernel_is_compiled_once_a_machine(fresh, monkeypatch):
    """The second call finds the library, without a compiler run; nothing else is left behind."""
    library = build.compile_library(cpu._SOURCE)
    assert list(fresh.iterdir()) == [library]
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert build.compile_library(cpu._SOURCE) == library


def test_without_a_compiler_xla_serves_and_a_warning_says_why(fresh, monkeypatch, caplog):
    """The choice falls back to XLA; asking for the kernel by name is an error with the remedy."""
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX", raising=False)
    inputs = q, k_pages, v_pages, rows = make_inputs(TEST_SHAPES[3], seed=0)
    with caplog.at_level(logging.WARNING, "pallas_kernels"):
        got = jax.jit(partial(paged_attention, layer=1, rows=rows))(q, k_pages, v_pages)
    assert "no C++ compiler" in caplog.text
    wanted = paged_attention(*inputs[:3], 1, rows, implementation="xla")
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    with pytest.raises(NotImplementedError, match="install one"):
        paged_attention(*inputs[:3], 1, rows, implementation="cpu")


def test_a_failing_compiler_is_quoted(fresh, monkeypatch):
    """A source that does not compile is refused with the compiler's own words, and no litter."""
    source = fresh / "kernels" / "broken.cc"
    source.parent.mkdir()
    source.write_text("int main( {")
    monkeypatch.setenv("PALLAS_KERNELS_CACHE", str(fresh / "cache"))
    with pytest.raises(NotImplementedError, match="error"):
        build.compile_library(source)
    assert not list((fresh / "cache").iterdir())


@pytest.fixture
def small(fresh, monkeypatch):
    """A source that compiles in no time."""
    source = fresh / "kernels" / "small.cc"
    source.parent.mkdir()
    source.write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setenv("PALLAS_KERNELS_CACHE", str(fresh / "cache"))
    return source


@pytest.mark.parametrize("damage", ["cut", "emptied", "changed"])
def test_a_damaged_library_is_compiled_again(small, damage):
    """Half a library is never loaded: it is replaced by a whole one, which serves."""
    library = build.compile_library(small)
    content = library.read_bytes()
    half = len(content) // 2
    damaged = {"cut": content[:half], "emptied": b"", "changed": content[:half] + bytes(half)}
    library.write_bytes(damaged[damage])
    again, answer = build.load_symbol(small, "answer")
    assert again == library and answer() == 42
    assert len(library.read_bytes()) == len(content)
    assert list(library.parent.iterdir()) == [library]


def test_a_library_without_the_symbol_is_compiled_again(small, caplog):
    """A whole library that is another one is replaced, though the process has loaded it."""
    other = small.with_name("other.cc")
    other.write_text('extern "C" int question() { return 0; }')
    library = build.compile_library(small)
    shutil.move(build.compile_library(other), library)
    with caplog.at_level(logging.WARNING, "pallas_kernels"):
        assert build.load_symbol(small, "answer")[1]() == 42
    assert "compiling small.cc again" in caplog.text


def test_a_library_that_never_loads_is_refused_by_name(small):
    """After one more compilation the error names the library, the same one at every call."""
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"kernels-small-\w+\.so cannot be loaded"):
            build.cpu_target(small, "no_such_symbol")


def test_another_compiler_version_compiles_again(small, monkeypatch, tmp_path):
    """The compiler is known by what it says of itself, not by its path."""
    real = build._find_compiler()
    compiler = tmp_path / "c++"
    libraries = set()
    for said in ("1.0", "2.0"):
        compiler.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo {said} && exit\nexec {real} "$@"\n'
        )
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        build._compiler_version.cache_clear()
        libraries.add(build.compile_library(small))
    assert len(libraries) == 2
