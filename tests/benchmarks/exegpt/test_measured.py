"""Schedules on devices beside their simulation, end to end on a tiny model."""

from __future__ import annotations

import json

import pytest

from benchmarks.exegpt import measured


def test_rra_and_waa_run_and_are_simulated(tmp_path):
    """Both have the tokens of one device under the default policy, and all figures."""
    path = tmp_path / "measured.json"
    sizes = {
        **{"--num-requests": 6, "--prompt-tokens": 12, "--output-tokens": 8, "--repeats": 1},
        **{"--encode-batches": 2, "--decode-iterations": 2},
        **{"--max-slots": 4, "--max-context": 64, "--max-step-tokens": 32},
    }
    options = [str(each) for pair in sizes.items() for each in pair]
    assert measured.main(["--model", "tiny", "--output", str(path), *options]) == 0
    result = json.loads(path.read_text())
    assert [(s["schedule"], s["devices"]) for s in result["schedules"]] == [
        ("rra 2 2", [1]),
        ("waa 2 2", [1, 1]),
    ]
    assert result["all_tokens_agree"]
    for schedule in result["schedules"]:
        for figures in (schedule["measured"], schedule["simulated"]):
            assert min(figures.values()) > 0
            assert figures["latency_p50_s"] <= figures["latency_p99_s"]
        error = schedule["error"]["output_tokens_per_s"]
        of = (schedule[kind]["output_tokens_per_s"] for kind in ("simulated", "measured"))
        assert next(of) / next(of) - 1 == pytest.approx(error)
