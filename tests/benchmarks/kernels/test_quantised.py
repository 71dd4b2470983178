"""The timing of products with weights in few bits."""

from __future__ import annotations

import json

from benchmarks.kernels.quantised import FORMATS, main


def test_every_format_is_timed(capsys):
    """Each format and number of rows has a time, and fewer bits are fewer bytes."""
    assert main(["--rows", "1,3", "--layers", "1", "--repeats", "1"]) == 0
    formats = json.loads(capsys.readouterr().out)["formats"]
    assert list(formats) == list(FORMATS)
    moved = []
    for by_rows in formats.values():
        assert list(by_rows) == ["1", "3"]
        assert all(figures["ms"] > 0 for figures in by_rows.values())
        moved.append(by_rows["1"]["gb_per_s"] * by_rows["1"]["ms"])
    assert moved[0] > 3.5 * moved[1] > 5 * moved[2] > 0
