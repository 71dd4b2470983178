"""What adapters cost, end to end on a tiny model."""

from __future__ import annotations

import json

import pytest

from benchmarks.adapters import main
from tests.benchmarks.tiny_model import arguments

pytestmark = pytest.mark.release


def test_each_number_of_adapters_is_compared_with_none(capsys, tmp_path):
    more = ["--repeats", "1", "--adapters", "0,2", "--rank", "2", "--adapter-dtype", "bfloat16"]
    more += ["--max-context", "256"]
    assert main([*arguments(tmp_path), *more, "--output-tokens", "12"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [case["num_adapters"] for case in result["cases"]] == [0, 2]
    without = result["without"]
    for case in result["cases"]:
        assert case["output_tokens"] == without["output_tokens"] > 0
        share = case["tokens_per_s"] / without["tokens_per_s"]
        assert case["share_of_throughput"]["median"] == share


def test_no_adapters_at_all_are_refused(capsys, tmp_path):
    assert main([*arguments(tmp_path), "--adapters", "0"]) == 2
    assert "--adapters 0" in capsys.readouterr().err
