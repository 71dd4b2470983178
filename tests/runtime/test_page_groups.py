"""A model with sliding windows keeps no pages behind them, and answers as with one group."""

from __future__ import annotations

import pytest
from flax import nnx

from jaxserve import Runtime, SamplingParams
from jaxserve.models.families import config_from_hf
from jaxserve.models.families.gemma import Gemma
from jaxserve.runtime.stats import RuntimeStats
from jaxserve.testing import OPTIONS, random_prompts

pytestmark = pytest.mark.release
CONFIG = {
    "model_type": "gemma3_text",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "max_position_embeddings": 128,
    "sliding_window": 11,
    "sliding_window_pattern": 4,
}
PROMPTS = random_prompts(8, longest=90)
PARAMS = SamplingParams(max_tokens=24)


def _served(model: Gemma, **options: object) -> tuple[list[tuple[int, ...]], RuntimeStats]:
    """Return the tokens of two turns of eight conversations, and the counters after them."""
    with Runtime(model, **OPTIONS, **options) as rt:
        first = rt.generate(list(map(list, PROMPTS)), PARAMS)
        turns = [[*p, *c.token_ids, 5, 6] for p, c in zip(PROMPTS, first, strict=True)]
        second = rt.generate(turns, SamplingParams(max_tokens=2))
        stats = rt.stats()
    return [c.token_ids for c in (*first, *second)], stats


def test_answers_are_those_of_one_group():
    """Chunked prompts, second turns from cached pages, and a pool in which some are preempted."""
    model = Gemma(config_from_hf(CONFIG), rngs=nnx.Rngs(0))
    for block in model.blocks:
        for weight in (block.attention.wqkv, block.attention.wo, block.mlp.down):
            weight[...] = weight[...] * 4
    wanted, one = _served(model, host_memory="1MiB")
    grouped, stats = _served(model, host_memory=0)
    assert len({token for tokens in wanted for token in tokens}) > 20
    assert grouped == wanted and stats.num_prefix_hit > one.num_prefix_hit / 2
    small, stats = _served(model, host_memory=0, kv_memory=50_000)
    assert small == wanted and stats.num_preemptions
