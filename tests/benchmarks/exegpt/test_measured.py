"""Schedules on devices beside their simulation, end to end on tiny models."""

from __future__ import annotations

import json

import pytest

from benchmarks.exegpt import measured

pytestmark = pytest.mark.release

SIZES = {
    **{"--num-requests": 6, "--prompt-tokens": 12, "--output-tokens": 8, "--repeats": 1},
    **{"--encode-batches": 2, "--decode-iterations": 2, "--policies": "auto,orca"},
    **{"--max-slots": 4, "--max-context": 64, "--max-step-tokens": 32},
}


def _run(path, **options: object) -> tuple[int, dict]:
    given = SIZES | {f"--{name}": value for name, value in options.items()}
    arguments = [str(each) for pair in given.items() for each in pair]
    return measured.main([*arguments, "--output", str(path)]), json.loads(path.read_text())


def test_an_encoder_decoder_model_has_the_same_tokens_on_two_groups(tmp_path):
    """As on one device under another policy."""
    code, result = _run(tmp_path / "measured.json", model="tiny_t5", groups="1/1", policies="auto")
    assert code == 0 and result["all_tokens_agree"]
    assert [(s["schedule"], s["groups"]) for s in result["schedules"]] == [("waa 2 2", "1/1")]


def test_rra_and_waa_run_and_are_simulated(tmp_path):
    """Both have the tokens of other policies on one device, and all figures."""
    code, result = _run(tmp_path / "measured.json", model="tiny")
    assert code == 0 and not result["skipped"]
    assert [(s["schedule"], s["groups"]) for s in result["schedules"]] == [
        ("rra 2 2", "1"),
        ("waa 2 2", "1/1"),
    ]
    assert [each["policy"] for each in result["policies"]] == ["auto", "orca"]
    assert result["all_tokens_agree"]
    for schedule in result["schedules"]:
        for figures in (schedule["measured"], schedule["simulated"]):
            assert min(figures[name] for name in measured.FIGURES) > 0
            assert figures["p50_s"] <= figures["p99_s"]
        error = schedule["error"]["p99_s"]
        of = (schedule[kind]["p99_s"] for kind in ("simulated", "measured"))
        assert next(of) / next(of) - 1 == pytest.approx(error)
        assert abs(error) <= result["errors"]["p99_s"]["most"]


def test_what_the_budget_does_not_allow_is_named(tmp_path, capsys):
    """A result without runs is whole JSON, and says what is missing."""
    code, result = _run(tmp_path / "measured.json", model="tiny", budget=0)
    assert code == 0 and not result["schedules"] and not result["errors"]
    assert result["skipped"] == ["auto", "orca", "rra 2 2 on 1", "waa 2 2 on 1/1"]
    assert "Left out, since the time was up: auto, orca" in capsys.readouterr().err
    assert measured.main(["--model", "tiny", "--repeats", "0"]) == 2
