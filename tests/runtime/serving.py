"""What tests of the runtime share: weights, tiny models of families, and waiting for tokens."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxserve import Runtime
from jaxserve.models.families import config_from_hf
from jaxserve.models.loading import abstract_model, random_params
from jaxserve.testing.tiny import MAX_CONTEXT, VOCAB_SIZE, tiny_llama
from tests.common.waiting import until

# Of a runtime of a checkpoint that a test has written.
CHECKPOINT: dict[str, Any] = dict(
    max_slots=4,
    max_step_tokens=16,
    page_size=8,
    max_context=128,
    progress=False,
    dtype="float32",
    warmup=False,
)
_SIZES = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    max_position_embeddings=MAX_CONTEXT,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "gpt_neox": dict(**_SIZES | {"num_attention_heads": 4}, rotary_pct=0.5),  # head_dim is 8
    "gemma2": dict(
        **_SIZES,
        query_pre_attn_scalar=8,
        sliding_window=7,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen3_moe": dict(**_SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16),
}


def tiny_family(name: str) -> nnx.Module:
    """Return a model of a family, with random weights."""
    config = config_from_hf({"model_type": name, **FAMILIES[name]})
    return nnx.merge(abstract_model(config)[0], random_params(config, 0))


def weights(seed: int = 0, **options: Any) -> nnx.State:
    """Return the parameters of a tiny model."""
    return nnx.state(tiny_llama(seed, **options), nnx.Param)


def tokens(completions: Any) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def bits_of(prompts: Any, params: Any, rt: Runtime, chosen: Any) -> dict[int, Any]:
    """Return tokens and log-probabilities of some of the requests, computed together, by index."""
    done = rt.generate([prompts[i] for i in chosen], [params[i] for i in chosen], progress=False)
    return {i: (each.token_ids, each.logprobs) for i, each in zip(chosen, done, strict=True)}


def pointers(tree: Any) -> list[int]:
    """Return the addresses of the arrays of a tree."""
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


def has_shards_of(tree: Any, other: Any) -> bool:
    """Return whether each shard of two trees is the same memory."""
    return all(
        a.data.unsafe_buffer_pointer() == b.data.unsafe_buffer_pointer()
        for own, theirs in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
        for a, b in zip(own.addressable_shards, theirs.addressable_shards, strict=True)
    )


def until_tokens(rt: Runtime, num: int) -> None:
    """Wait until the runtime has computed this many tokens in all."""
    until(lambda: rt.stats().num_tokens >= num)
