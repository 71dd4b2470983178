"""The arena's benchmark on a few requests: figures of each policy, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.arena import main
from benchmarks.figures.results import Place
from benchmarks.figures.tables import ARENA

pytestmark = pytest.mark.release

SMALL = "--repeats 2 --num-requests 12 --loads 0.5,1.2 --traces chat --kv-memory 1GiB"


def test_policies_are_compared_at_each_load(capsys):
    """The baseline is 1 by itself, each load has its runs, and the table says where auto is."""
    assert main([*SMALL.split(), "--policies", "orca,auto"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["loads"] == ["50%", "120%"] and result["repeats"] == 2
    policies = result["traces"]["chat"]["policies"]
    assert list(policies) == ["vllm_like", "orca", "auto"]
    assert policies["vllm_like"]["loads"]["50%"]["over_baseline"] == {"p50": 1.0, "p99": 1.0}
    for own in policies.values():
        for load in own["loads"].values():
            assert load["latency_s"]["p99"] > 0 and len(load["runs"]) == 2
    text = ARENA(Place(Path("arena.json"), result, ""))
    assert "| chat | vllm like | 1.00 |" in text and "In p99 of the latency, auto is" in text


def test_what_is_known_of_lengths_is_varied(capsys):
    """By default `auto` also runs without predictions and with exact ones, and all else once."""
    assert main([*SMALL.split(), "--loads", "1.2"]) == 0
    policies = json.loads(capsys.readouterr().out)["traces"]["chat"]["policies"]
    assert {"auto", "auto_without_predictions", "auto_with_exact_lengths", "tie"} <= set(policies)
    assert main(["--traces", "chess"]) == 2 and "chess" in capsys.readouterr().err
