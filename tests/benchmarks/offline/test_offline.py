"""The throughput of simultaneous requests, end to end on a tiny model."""

from __future__ import annotations

import json

import pytest

from benchmarks.offline.__main__ import main
from tests.benchmarks.tiny_model import arguments


@pytest.mark.release
def test_every_run_is_whole(capsys, tmp_path):
    """Each run computes all prompts again, and the bound is compared with the median."""
    options = ["random" if each == "uniform" else each for each in arguments(tmp_path)]
    assert main([*options, "--repeats", "3"]) == 0
    result = json.loads(capsys.readouterr().out)
    runs = result["runs"]
    assert [run["output_tokens"] for run in runs] == [24] * 3
    assert all(run["engine"]["num_tokens"] >= 4 * (4 + 5) for run in runs)
    assert result["wall_s"] == sorted(run["wall_s"] for run in runs)[1]
    bound = result["bound"]
    assert bound["reached"] == pytest.approx(bound["run_s"] / result["wall_s"])
    assert result["compare"] is None
