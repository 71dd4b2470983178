"""What grammars cost, end to end on a tiny model."""

from __future__ import annotations

import json

from benchmarks.structured.__main__ import main
from tests.benchmarks.tiny_model import arguments


def test_both_ways_have_as_many_tokens(capsys, tmp_path):
    """Answers with and without grammars are counted alike, and only the former have masks."""
    assert main([*arguments(tmp_path), "--repeats", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    ours, base = result["with"], result["without"]
    assert ours["output_tokens"] == base["output_tokens"] > 0
    assert ours["mask_token_s"] > 0 == base["mask_token_s"]
    assert result["throughput_share"]["median"] == ours["tokens_per_s"] / base["tokens_per_s"]
