"""Page groups beside one group, measured on a tiny pool."""

from __future__ import annotations

import json

import pytest

from benchmarks.windows import main

pytestmark = pytest.mark.release

SMALL = (
    *("--window", "32", "--num-requests", "4", "--prompt-tokens", "160", "--repeats", "1"),
    *("--min-output-tokens", "8", "--output-tokens", "24", "--kv-memory", "3MiB"),
)


def test_more_sequences_fit_and_answer_the_same(capsys):
    assert main([*SMALL, "--layers", "6"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["same_tokens"]
    one, grouped = (result["pages"][name] for name in ("one_group", "grouped"))
    assert grouped["output_tokens"] == one["output_tokens"] > 0
    assert grouped["num_running"]["max"] > one["num_running"]["max"]
    assert 0 < one["num_running"]["mean"] <= one["num_running"]["max"]


def test_layers_that_see_the_same_are_refused(capsys):
    assert main([*SMALL, "--layers", "5"]) == 2
    assert "at least 6 layers" in capsys.readouterr().err
