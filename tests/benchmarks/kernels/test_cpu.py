"""The benchmark of the kernels for CPUs."""

from __future__ import annotations

import json

import pytest

from benchmarks.kernels.cpu import FORMATS, PAGES, PRODUCTS, main

pytestmark = pytest.mark.release


def test_it_prints_each_case(capsys):
    """A rate for each product, attention and pass in one object; fewer bits are fewer bytes."""
    assert main("--rows 2 --layers 1 --repeats 1 --context 40".split()) == 0
    result = json.loads(capsys.readouterr().out)
    wanted = {f"product, {kind}, 2" for kind in PRODUCTS}
    wanted |= {f"attention, {dtype}, 2" for dtype in PAGES}
    wanted |= {f"passes, {implementation}, 2" for implementation in ("cpu", "xla")}
    assert result["cases"].keys() == wanted
    for figures in result["cases"].values():
        assert figures["least_ms"] > 0 and figures["of_roofline"] > 0
    moved = [
        figures["gb_per_s"] * figures["least_ms"]
        for figures in (result["cases"][f"product, {kind}, 2"] for kind in ("dense", *FORMATS))
    ]
    assert moved[0] > 3.5 * moved[1] > 5 * moved[2] > 0 and moved[2] > moved[3]
