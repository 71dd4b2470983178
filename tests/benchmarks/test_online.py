"""Latency against load, end to end on a tiny model."""

from __future__ import annotations

import json

import pytest

from benchmarks.online import main
from tests.benchmarks.tiny_model import arguments

pytestmark = pytest.mark.release


def test_every_rate_has_its_runs(capsys, tmp_path):
    """Each policy has its runs at every rate, with the share of requests within the limits."""
    more = ["--policies", "orca", "--rates", "50,200", "--repeats", "2", "--slo-ttft", "60"]
    assert main([*arguments(tmp_path), *more]) == 0
    result = json.loads(capsys.readouterr().out)
    points = result["policies"]["orca"]["points"]
    assert [point["rate"] for point in points] == [50, 200]
    for point in points:
        assert [run["goodput"]["share"] for run in point["runs"]] == [1.0, 1.0]
        low, high = point["range"]["requests_per_s"]
        assert low <= point["requests_per_s"] <= high
