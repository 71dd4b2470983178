"""What HTTP costs, end to end on a tiny model."""

from __future__ import annotations

import json

from benchmarks.http.__main__ import main
from tests.benchmarks.tiny_model import arguments


def test_both_ways_answer_the_same_requests(capsys, tmp_path):
    """Each number of connections has figures of both ways, and the shares between them."""
    more = ["--connections", "1,6", "--repeats", "1"]
    assert main([*arguments(tmp_path), *more]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["connections"] for point in points] == [1, 6]
    for point in points:
        assert set(point["runs"]) == {"in process", "http"}
        ours = point["runs"]["http"]["at_once"][0]
        assert ours["tokens_per_s"] > 0 and ours["first_token_s"]["p50"] > 0
        low, high = point["throughput_share"]["range"]
        assert low <= point["throughput_share"]["median"] <= high
