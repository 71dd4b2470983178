"""`benchmarks.roles` compares a fleet with roles to plain replicas, on a tiny model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.roles import CONTENDERS, main
from tests.fleet.test_fleet import CONFIG

pytestmark = pytest.mark.release

SETTINGS = {
    **{"load": "random", "max_slots": 4, "max_step_tokens": 32, "max_context": 128},
    **{"kv_memory": "2MB", "host_memory": "2MB", "warmup": False, "seed": 3},
}


def test_both_fleets_answer_the_same_requests(tmp_path, capsys):
    """Answers have the same tokens, KV is sent only with roles, and the result is one object."""
    pytest.importorskip("ray")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    output = tmp_path / "result.json"
    arguments = [str(tmp_path), json.dumps(SETTINGS), "--num-requests", "3", "--arrivals", "all"]
    sizes = ["--prompt-tokens", "70", "--output-tokens", "4", "--repeats", "1"]
    assert main([*arguments, *sizes, "--output", str(output)]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert result == json.loads(output.read_text())
    assert result["benchmark"] == "roles" and result["same_tokens"]
    assert result["fleets"].keys() == CONTENDERS.keys()
    for figures in result["fleets"].values():
        assert 0 < figures["first_token_s"]["p50"] <= figures["latency_s"]["p50"]
        assert figures["output_tokens_per_s"] == pytest.approx(12 / figures["wall_s"])
    sent = {name: figures["tokens_sent"] for name, figures in result["fleets"].items()}
    assert sent["roles"] >= 3 * 64 > sent["whole"]
