"""What grammars cost, end to end on a tiny model."""

from __future__ import annotations

import json

import pytest

from benchmarks.structured import main
from tests.benchmarks.tiny_model import arguments
from tests.models.gguf_models import TOKENIZER, write_gguf

pytestmark = pytest.mark.release

# Letters and what JSON is written with, as many as the tiny model has tokens.
_TOKENS = [*"abcdefghijklmnopqrstuvwxyz", *'{}":,[]_Ġ12', "ab", "<|end|>", "<|bos|>"]


def test_both_ways_have_as_many_tokens(capsys, tmp_path):
    """Answers with and without grammars are counted alike, and only the former have masks."""
    tokenizer = {**TOKENIZER, "ggml.tokens": _TOKENS}
    write_gguf(tmp_path / "tiny.gguf", "llama", tokenizer=tokenizer)
    more = ["--repeats", "1", "--output-tokens", "24"]
    assert main([*arguments(tmp_path), *more]) == 0
    result = json.loads(capsys.readouterr().out)
    ours, base = result["with"], result["without"]
    assert ours["output_tokens"] == base["output_tokens"] > 0
    assert ours["mask_token_s"] > 0 == base["mask_token_s"]
    assert 0.3 < ours["forced_share"] < 1
    assert result["costs"]["throughput_share"] == ours["tokens_per_s"] / base["tokens_per_s"]
