"""Layouts are compared, also if one of them has no memory for a batch."""

from __future__ import annotations

import pytest

from benchmarks.figures.tables import show_result

pytestmark = pytest.mark.release


def test_a_batch_without_memory_is_said(capsys):
    """The row of the batch says so; the other rows have their figures."""
    figures = {"decode_step_s": 0.002, "of_bound": 0.5, "host_gap_share": 0.01}
    rows = [
        {"layout": "scanned", "batch_size": 1, **figures},
        {"layout": "unrolled", "batch_size": 32, "does_not_fit": "3.0 GB"},
    ]
    about = {"layers": 8, "model": "llama-3-8b", "xla_flags": "", "device": "a GPU"}
    show_result({"benchmark": "choices", **about, "choices": rows})
    printed = capsys.readouterr().err
    assert "2.000" in printed and "3.0 GB" in printed
