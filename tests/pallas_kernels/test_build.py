"""Compiling C++ kernels on first use: kept, shared, and announced when it cannot be done."""

from __future__ import annotations

import logging
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
