"""The bits of requests in random batches, end to end on a tiny model."""

from __future__ import annotations

import json

import pytest

from benchmarks.invariance.__main__ import main
from tests.benchmarks.tiny_model import arguments

pytestmark = pytest.mark.release


def test_no_pair_of_batches_differs(capsys, tmp_path):
    """Every way compares its share of the pairs, and scores are those that sampling reported."""
    more = ["--repeats", "1", "--pairs", "24", "--num-requests", "6", "--output-tokens", "12"]
    assert main([*arguments(tmp_path), *more]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_pairs"] >= 24 and result["num_different"] == 0 == len(result["different"])
    assert list(result["ways"]) == ["whole", "short steps", "small pool", "speculating"]
    assert all(way["num_pairs"] >= 6 for way in result["ways"].values())
    assert result["scores"] == {"num_answers": 6, "num_different": 0, "largest_difference": 0.0}
    processed = {"num_answers": 3, "num_different": 0, "largest_difference": 0.0}
    assert result["processed_scores"] == processed
    cost = result["cost"]
    share = cost["deterministic"]["tokens_per_s"] / cost["ordinary"]["tokens_per_s"]
    assert cost["throughput_share"]["median"] == share


def test_a_number_of_pairs_that_is_refused(capsys, tmp_path):
    """None is refused, in one line."""
    assert main([*arguments(tmp_path), "--pairs", "0"]) == 2
    assert "--pairs is 0; it must be at least 1" in capsys.readouterr().err
