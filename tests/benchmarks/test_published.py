"""The papers' workloads on a few requests: ratios to each baseline, and the tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.figures.results import Place
from benchmarks.figures.tables import published
from benchmarks.published import PAPERS, main

pytestmark = pytest.mark.release


def test_every_paper_has_a_table(capsys):
    """A baseline is 1 by itself, and a table says what its paper reports."""
    assert main(["--repeats", "2", "--num-requests", "16"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["papers"]) == list(PAPERS)
    for name, paper in result["papers"].items():
        first = next(iter(paper["policies"].values()))
        assert set(first["over_baseline"].values()) == {1.0}
        assert name in paper["policies"] and len(first["runs"]) == 2
    text = published(Place(Path("published.json"), result, ""))
    assert "| vllm like | [1.00]() |" in text and PAPERS["ltr"].reports in text


def test_an_unknown_paper_is_refused(capsys):
    """The message has the names."""
    assert main(["--papers", "orca"]) == 2 and "slos_serve" in capsys.readouterr().err
