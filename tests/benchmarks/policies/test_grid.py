"""The simulated comparison: the same figures every time, and `auto` not behind."""

from __future__ import annotations

import json

import pytest

from benchmarks.policies.grid import main

pytestmark = pytest.mark.release

# An all-at-once run ends with a few long answers, so that few requests differ by chance.
_NOISE = 0.01


def _rows(capsys, num_requests: int, *more: str) -> list[dict]:
    few = ["--policies", "vllm_like,auto", "--workloads", "T", "--num-requests", f"{num_requests}"]
    assert main([*few, *more]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


@pytest.mark.parametrize("more", [[], ["--no-host"]], ids=["host", "no host"])
def test_auto_is_not_behind(capsys, more):
    """In no pool, with and without predictions, and whether preempted KV is copied or computed."""
    rows = _rows(capsys, 64, "--max-slots", "32", *more)
    assert len(rows) == 3 * (1 + 3)
    for row in rows:
        if row["policy"] != "auto":
            continue
        others = [r for r in rows if r["pool"] == row["pool"] and r["policy"] != "auto"]
        rate = max(r["output_tokens_per_s"] for r in others)
        p99 = min(r["latency_s"]["p99"] for r in others)
        where = row["pool"], row["predictor"]
        assert row["output_tokens_per_s"] > (1 - _NOISE) * rate, where
        assert row["latency_s"]["p99"] < (1 + _NOISE) * p99, where


def test_figures_are_the_same_every_time(capsys):
    """Nothing depends on the machine or on earlier runs."""
    assert _rows(capsys, 16) == _rows(capsys, 16)
