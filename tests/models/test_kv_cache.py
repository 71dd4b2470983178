"""The paged cache in 8 bits: its size, and the values that attention reads from it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.options import KV_DTYPES
from jaxserve.kernels import Rows, quantize
from jaxserve.models.batch import AttentionBatch, KVCache, empty_cache
from jaxserve.models.families.llama import LlamaConfig
from jaxserve.testing.tiny import tiny_llama
from tests.common.closeness import assert_close
from tests.common.tiers import some

PAGE_SIZE = 4
TABLES = 1 + np.random.default_rng(0).permutation(24).reshape(3, 8).astype(np.int32)
# (sequence, tokens) of the rows of each step; the last two decode.
STEPS = (
    ((0, 9), (2, 1)),
    ((2, 6), (0, 1), (1, 13)),
    ((0, 1), (1, 1), (2, 1)),
    ((1, 1), (2, 1), (0, 1)),
)


def _config(layers: int, kv_heads: int, head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=layers,
        num_heads=kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=8,
    )


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("config", "wide", "ratio"),
    [
        (_config(30, 3, 64), "float32", 256 / 68),  # SmolLM2 135M
        (_config(32, 8, 128), "bfloat16", 256 / 132),  # Llama 3 8B
    ],
)
@pytest.mark.parametrize("layout", ["unrolled", "scanned"])
def test_pages_take_a_half_or_a_quarter_of_the_bytes(dtype, config, wide, ratio, layout):
    """An element is one byte, and each head of a token has a scale of four bytes."""

    def num_bytes(dtype: str) -> int:
        cache = jax.eval_shape(lambda: empty_cache(config, 9, 32, dtype, layout))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))

    assert num_bytes(wide) / num_bytes(dtype) == pytest.approx(ratio)


def _batch(step, lengths: list[int]) -> AttentionBatch:
    """Return the batch of these rows after `lengths` tokens per sequence, which it updates."""
    fields, positions, page = [], [], []
    for sequence, count in step:
        first = lengths[sequence]
        new = np.arange(first, first + count)
        fields.append((len(positions), count, first, first + count))
        positions += new.tolist()
        page += TABLES[sequence, new // PAGE_SIZE].tolist()
        lengths[sequence] += count
    rows = (jnp.asarray(field, jnp.int32) for field in np.transpose(fields))
    return AttentionBatch(
        positions=jnp.asarray(positions),
        page=jnp.asarray(page),
        offset=jnp.asarray(positions) % PAGE_SIZE,
        rows=Rows(*rows, page_table=jnp.asarray(TABLES[[sequence for sequence, _ in step]])),
        max_query_length=1 if all(count == 1 for _, count in step) else None,
    )


@partial(jax.jit, static_argnums=1)
def _attend(
    cache: KVCache, layer: int, qkv: jax.Array, batch: AttentionBatch
) -> tuple[jax.Array, KVCache]:
    return cache.attend(layer, qkv, None, batch)


def _restored(values: jax.Array, dtype: str) -> jax.Array:
    quantized, scales = quantize(values, dtype)
    return quantized.astype(jnp.float32) * scales[..., None]


@pytest.mark.parametrize("layout", some(["unrolled", "scanned"]))
@pytest.mark.parametrize("dtype", some(KV_DTYPES))
def test_attention_sees_what_was_written_rounded_once(dtype, layout):
    """Prefill, chunks and decoding agree, in every layer, with attention to rounded keys."""
    config = tiny_llama().config
    narrow = empty_cache(config, 25, PAGE_SIZE, dtype, layout)
    # The null page may hold any values, and so may its scales.
    narrow = jax.tree.map(lambda x: x.at[:, 0].set(jnp.nan if x.ndim == 4 else 1), narrow)
    wide = empty_cache(config, 25, PAGE_SIZE, "float32", layout)
    rng, lengths = np.random.default_rng(1), [0, 0, 0]
    for step in STEPS:
        batch = _batch(step, lengths)
        for layer in range(config.num_layers):
            shape = (len(batch.positions), config.num_kv_heads, config.group + 2, 8)
            qkv = jnp.asarray(rng.normal(0, 2, shape), jnp.float32)
            rounded = qkv.at[:, :, -2:].set(_restored(qkv[:, :, -2:], dtype))
            got, narrow = _attend(narrow, layer, qkv, batch)
            wanted, wide = _attend(wide, layer, rounded, batch)
            assert_close(got, wanted, 1e-6)
    for pages, scales, rounded in (
        (narrow.k_pages, narrow.k_scales, wide.k_pages),
        (narrow.v_pages, narrow.v_scales, wide.v_pages),
    ):
        for page, scale, other in zip(pages, scales, rounded, strict=True):
            restored = page[:, 1:].astype(jnp.float32) * scale[:, 1:, ..., None]
            np.testing.assert_array_equal(restored, other[:, 1:])


@pytest.mark.parametrize("layout", some(["unrolled", "scanned"]))
@pytest.mark.parametrize("dtype", some(KV_DTYPES))
@pytest.mark.parametrize("attention", ["cpu", "xla"])
def test_pages_and_scales_are_updated_in_place(attention, dtype, layout):
    """A donated cache of any size is not copied for writing a few tokens, nor for reading."""
    cache = jax.eval_shape(lambda: empty_cache(_config(2, 2, 64), 4000, 32, dtype, layout))
    batch = replace(_batch(STEPS[-1], [5, 6, 7]), implementation=attention)

    @partial(jax.jit, donate_argnums=0)
    def step(cache: KVCache, qkv: jax.Array) -> tuple[KVCache, jax.Array]:
        out, cache = cache.attend(0, qkv, None, batch)
        return cache, out

    sizes = step.lower(cache, jnp.zeros((3, 2, 4, 64))).compile().memory_analysis()
    cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert sizes.alias_size_in_bytes == cache_bytes
    assert sizes.temp_size_in_bytes < cache_bytes / 20
