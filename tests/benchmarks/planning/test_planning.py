"""Planning and host time are measured for every combination, and for another checkout too."""

from __future__ import annotations

import json

import pytest

from benchmarks.common.environment import ROOT
from benchmarks.common.processes import HERE, OTHER
from benchmarks.planning.__main__ import main
from benchmarks.planning.host_time import measure

pytestmark = pytest.mark.release

ARGUMENTS = ("--policies", "orca,auto", "--slots", "4", "--waiting", "10,20", "--steps", "5")
ARGUMENTS += ("--contexts", "1024")


def test_figures_of_a_point_are_in_order():
    """Planning takes a part of the host's time, and percentiles are in ascending order."""
    point = measure("vllm_like", max_slots=4, num_waiting=10, num_steps=60)
    for kind in ("planning_ms", "host_ms", "host_cpu_ms"):
        assert 0 < point[kind]["p50"] <= point[kind]["p99"] <= point[kind]["max"]
    assert point["planning_ms"]["p50"] < point["host_ms"]["p50"]
    assert point["num_preemptions"] > 0  # the pool is too small, as intended


def test_checkouts_take_turns(capsys, tmp_path):
    """Both checkouts have every point, each with its runs."""
    output = tmp_path / "planning.json"
    more = ("--repeats", "2", "--against", str(ROOT), "--output", str(output))
    assert main([*ARGUMENTS, *more]) == 0
    result = json.loads(output.read_text())
    assert result == json.loads(capsys.readouterr().out)
    for checkout in (HERE, OTHER):
        points = result["points"][checkout]
        places = [(p["policy"], p["max_slots"], p["num_waiting"]) for p in points]
        assert places == [(name, 4, waiting) for name in ("orca", "auto") for waiting in (10, 20)]
        assert [len(point["runs"]) for point in points] == [2] * 4


def test_bad_options_are_refused(capsys, tmp_path):
    """A folder without jaxserve, and texts instead of numbers, are refused."""
    assert main(["--against", str(tmp_path)]) == 2
    assert "has no jaxserve" in capsys.readouterr().err
    assert main(["--slots", "many"]) == 2
    assert "--slots 'many'" in capsys.readouterr().err
