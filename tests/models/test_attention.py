"""Causal, bidirectional and cross attention over pages agree with plain dense attention."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.kernels import apply_rope
from jaxserve.kernels.paged_attention import Launches, Plan, Rows, Tiling
from jaxserve.models.attention import (
    Attention,
    CrossAttention,
    bidirectional_rows,
    causal_rows,
    cross_rows,
)
from jaxserve.models.batch import AttentionBatch, KVCache, empty_cache
from jaxserve.models.context import CrossContext, PagedContext
from jaxserve.models.families.llama import LlamaConfig
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.rope import Rope, rope_tables
from jaxserve.sharding import make_mesh, state_shardings
from tests.common.closeness import assert_close
from tests.common.tiers import some

# (implementation, seed); interpreted kernels are slow.
RANDOM_CASES = (("xla", 0), ("xla", 1), ("cpu", 0), ("cpu", 1), ("triton_interpreted", 0))
KINDS = ("causal", "bidirectional", "cross")
PAGE_SIZE = 8


@partial(jax.jit, static_argnums=1)
def _written(cache: KVCache, layer: int, kv: jax.Array, batch: AttentionBatch) -> KVCache:
    return cache.write(layer, kv, batch)


@partial(jax.jit, static_argnums=1)
def _read(cache: KVCache, layer: int, q: jax.Array, batch: AttentionBatch) -> jax.Array:
    return cache.read(layer, q, batch)


def _dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return one sequence's attention: q [n, heads, d]; k, v [m, kv_heads, d]; seen bool [n, m]."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(np.asarray(x, np.float64), group, axis=1) for x in (k, v))
    logits = np.einsum("nhd,mhd->hnm", np.asarray(q, np.float64), k) * q.shape[-1] ** -0.5
    weights = np.exp(np.where(seen, logits, -np.inf) - logits.max())
    return np.einsum("hnm,mhd->nhd", weights / weights.sum(-1, keepdims=True), v)


def _config(num_heads: int, num_kv_heads: int, head_dim: int = 16, **others) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=8,
        hidden_size=24,
        intermediate_size=8,
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        **others,
    )


@dataclass(frozen=True)
class _Pages:
    """Pages of some sequences, scattered over a cache whose other pages are NaN."""

    table: np.ndarray  # int32 [sequences, pages]
    num_pages: int

    @classmethod
    def of(cls, num_sequences: int, longest: int, seed: int) -> _Pages:
        width = -(-longest // PAGE_SIZE)
        pages = 1 + np.random.default_rng(seed).permutation(num_sequences * width)
        return cls(pages.reshape(num_sequences, width).astype(np.int32), 2 + len(pages))

    def cache(self, config: LlamaConfig, dtype: str = "float32", num_shards: int = 1) -> KVCache:
        cache = empty_cache(
            config, self.num_pages, PAGE_SIZE, dtype, "unrolled", num_shards=num_shards
        )
        return jax.tree.map(
            lambda x: jnp.full_like(x, 77 if x.dtype == jnp.int8 else jnp.nan), cache
        )

    def batch(self, lengths, rows: Rows, implementation: str | None = None) -> AttentionBatch:
        """Return the batch that writes the first `lengths` tokens of each sequence."""
        positions = np.concatenate([np.arange(length) for length in lengths])
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        return AttentionBatch(
            positions=jnp.asarray(positions, jnp.int32),
            page=jnp.asarray(self.table[sequence, positions // PAGE_SIZE]),
            offset=jnp.asarray(positions % PAGE_SIZE, jnp.int32),
            rows=rows,
            max_query_length=None,
            implementation=implementation,
        )


def _int32(*values) -> list[jax.Array]:
    return [jnp.asarray(np.asarray(each), jnp.int32) for each in values]


def _starts(lengths) -> np.ndarray:
    return np.cumsum(lengths) - lengths


def _rows(kind: str, queries: np.ndarray, keys: np.ndarray, table: np.ndarray) -> Rows:
    start, queries, keys, pages = _int32(_starts(queries), queries, keys, table)
    if kind == "bidirectional":
        return bidirectional_rows(query_start=start, length=keys, page_table=pages)
    if kind == "cross":
        return cross_rows(
            query_start=start, query_length=queries, encoded_length=keys, encoded_page_table=pages
        )
    return causal_rows(
        query_start=start, query_length=queries, first_position=keys - queries, page_table=pages
    )


def _plan(rows: Rows, num_tokens: int, kv_heads: int, group: int) -> Plan:
    """Return the plan for kernels that need one: items of a device with few programs."""
    tiling = Tiling(
        kv_heads=kv_heads,
        group=group,
        split_rows=16,
        tile_rows=16,
        split_keys=32,
        launches=Launches(block_keys=16),
        split_programs=6,
        tile_programs=6,
    )
    return rows.plan(
        tiling, num_tokens=num_tokens, max_context=rows.page_table.shape[1] * PAGE_SIZE
    )


@pytest.mark.parametrize(
    ("implementation", "seed", "kind"),
    some([(*case, kind) for case in RANDOM_CASES for kind in KINDS], 0, 1, 2, 6, 7, 8, 12),
)
def test_each_kind_is_dense_attention(implementation, kind, seed):
    """Random ragged rows with grouped queries agree; the seed is in the test's name."""
    random = np.random.default_rng(seed)
    kv_heads, group = int(random.integers(1, 4)), int(random.integers(1, 4))
    config = _config(kv_heads * group, kv_heads)
    count = 5
    keys = random.integers(1, 70, count)
    queries = {
        "causal": np.maximum(1, keys - random.integers(0, 60, count)),
        "bidirectional": keys,
        "cross": random.integers(1, 40, count),
    }[kind]
    queries[1] = keys[1] if kind == "bidirectional" else 1
    pages = _Pages.of(count, 70, seed)

    def normal(tokens: int, heads: int, columns: tuple[int, ...] = ()) -> jax.Array:
        return jnp.asarray(random.standard_normal((tokens, heads, *columns, 16)), jnp.float32)

    kv, q = normal(keys.sum(), kv_heads, (2,)), normal(queries.sum(), kv_heads * group)
    rows = _rows(kind, queries, keys, pages.table)
    cache = _written(pages.cache(config), 1, kv, pages.batch(keys, rows))
    batch = AttentionBatch(
        positions=jnp.zeros(len(q), jnp.int32),
        page=None,
        offset=None,
        rows=rows,
        max_query_length=None,
        plan=_plan(rows, len(q), kv_heads, group),
        implementation=implementation,
    )
    got = np.asarray(_read(cache, 1, q, batch))
    for i, (first, begin) in enumerate(zip(_starts(queries), _starts(keys), strict=True)):
        n, m = queries[i], keys[i]
        own = np.asarray(kv)[begin : begin + m]
        seen = np.ones((n, m), bool)
        if kind == "causal":
            seen = np.arange(m) <= np.arange(m - n, m)[:, None]
        wanted = _dense(np.asarray(q)[first : first + n], own[:, :, 0], own[:, :, 1], seen)
        assert_close(got[first : first + n], wanted)


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_cross_attention_of_a_decode_batch(implementation):
    """A decode loop has one query per row; one row is unused."""
    config, pages = _config(6, 2), _Pages.of(3, 40, 0)
    keys, queries = np.array([33, 1, 40]), np.array([1, 0, 1])
    random = np.random.default_rng(0)
    kv = jnp.asarray(random.standard_normal((keys.sum(), 2, 2, 16)), jnp.float32)
    q = jnp.asarray(random.standard_normal((3, 6, 16)), jnp.float32)
    rows = _rows("cross", queries, keys, pages.table)
    cache = _written(pages.cache(config), 0, kv, pages.batch(keys, rows))
    batch = replace(
        pages.batch(keys, rows, implementation), page=None, offset=None, max_query_length=1
    )
    got = np.asarray(_read(cache, 0, q, batch))
    for i in (0, 2):
        own = np.asarray(kv)[_starts(keys)[i] :][: keys[i]]
        wanted = _dense(
            np.asarray(q)[i : i + 1], own[:, :, 0], own[:, :, 1], np.ones((1, keys[i]), bool)
        )
        assert_close(got[i : i + 1], wanted)
    assert np.isfinite(got).all()


def _numpy(parameter: nnx.Param) -> np.ndarray:
    return np.asarray(parameter[...], np.float64)


@pytest.mark.parametrize("kind", some(["causal", "bidirectional"]))
def test_a_self_attention_layer_of_either_kind(kind):
    """Only the rows differ; rotary positions are the tokens' positions, from 0 on, in both."""
    config = _config(6, 2, rope=Rope(), qkv_bias=True, o_bias=True)
    layer = Attention(config, ParamMaker(nnx.Rngs(0), "float32"))
    layer.bqkv[...] = jax.random.normal(jax.random.key(1), layer.bqkv.shape)
    lengths, pages = np.array([19, 1, 30]), _Pages.of(3, 30, 0)
    rows = _rows(kind, lengths, lengths, pages.table)
    batch = pages.batch(lengths, rows)
    x = jax.random.normal(jax.random.key(2), (lengths.sum(), 24))
    tables = rope_tables(batch.positions, 16, config.rope)
    got = np.asarray(_attended(*nnx.split(layer), x, tables, batch, pages.cache(config)))
    qkv = np.einsum("te,ekxd->tkxd", np.asarray(x, np.float64), _numpy(layer.wqkv))
    qkv = jnp.asarray(qkv + _numpy(layer.bqkv), jnp.float32)
    rotated, v = np.asarray(apply_rope(qkv[:, :, :4], tables)), np.asarray(qkv[:, :, 4])
    for start, length in zip(_starts(lengths), lengths, strict=True):
        own = slice(start, start + length)
        seen = np.tri(length, dtype=bool) if kind == "causal" else np.ones((length, length), bool)
        q = rotated[own, :, :3].reshape(length, 6, 16)
        attended = _dense(q, rotated[own, :, 3], v[own], seen).reshape(length, 2, 3, 16)
        wanted = np.einsum("tkgd,kgde->te", attended, _numpy(layer.wo)) + _numpy(layer.bo)
        assert_close(got[own], wanted)


@partial(jax.jit, static_argnums=0)
def _attended(graphdef, params, x, tables, batch, cache):
    return nnx.merge(graphdef, params)(x, PagedContext(0, tables, None, batch, cache))


@pytest.mark.parametrize(
    ("num_shards", "dtype"), some([(1, "float32"), (1, "int8"), (4, "float32")])
)
def test_a_cross_attention_layer(num_shards, dtype):
    """Queries of the decoder in chunks attend to the encoder's output, which is written once.

    Keys and values may be stored in 8 bits, and heads split over a mesh, with copies of each
    KV head if there are more shards.
    """
    config = _config(8, 2, qkv_bias=True, o_bias=True)
    layer = CrossAttention(config, ParamMaker(nnx.Rngs(0), "float32"))
    for number, bias in enumerate((layer.bq, layer.bkv, layer.bo)):
        bias[...] = jax.random.normal(jax.random.key(number), bias.shape)
    encoded_lengths, pages = np.array([21, 40, 3]), _Pages.of(3, 40, 0)
    encoded = jax.random.normal(jax.random.key(5), (encoded_lengths.sum(), 24))
    # Each sequence of the decoder is a row; the last two read the same encoder's pages.
    reads, lengths = [0, 1, 1], np.array([4, 1, 9])
    x = jax.random.normal(jax.random.key(6), (lengths.sum(), 24))
    wanted = _cross_attended(layer, x, encoded, lengths, encoded_lengths, reads)

    cache = pages.cache(config, dtype, num_shards)
    graphdef, params = nnx.split(layer)
    in_force = nullcontext()
    if num_shards > 1:
        mesh = make_mesh(tensor=num_shards)
        params = jax.device_put(params, state_shardings(params, mesh))
        cache = jax.device_put(cache, NamedSharding(mesh, PartitionSpec(None, None, "tensor")))
        in_force = jax.set_mesh(mesh)
    with in_force:
        written, got = _cross_steps(
            graphdef,
            params,
            cache,
            encoded,
            x,
            pages.batch(
                encoded_lengths,
                _rows("bidirectional", encoded_lengths, encoded_lengths, pages.table),
            ),
            replace(
                pages.batch(
                    lengths,
                    _rows("cross", lengths, encoded_lengths[reads], pages.table[reads]),
                ),
                page=None,
                offset=None,
            ),
        )
    assert_close(got, wanted, 1e-5 if dtype == "float32" else 0.02)
    assert written.k_pages[0].dtype == dtype


@partial(jax.jit, static_argnums=0)
def _cross_steps(graphdef, params, cache, encoded, x, encoder_batch, decoder_batch):
    """Return the encoder's step, which writes, and the decoder's step, which reads."""
    layer = nnx.merge(graphdef, params)
    writing = CrossContext(0, encoder_batch, cache)
    layer.write(encoded, writing)
    reading = CrossContext(0, decoder_batch, writing.cache)
    out = layer(x, reading)
    return reading.cache, out


def _cross_attended(layer, x, encoded, lengths, encoded_lengths, reads) -> np.ndarray:
    q = np.einsum("te,ekgd->tkgd", np.asarray(x, np.float64), _numpy(layer.wq))
    q = (q + _numpy(layer.bq)).reshape(len(x), 8, 16)
    kv = np.einsum("te,ekxd->tkxd", np.asarray(encoded, np.float64), _numpy(layer.wkv))
    kv += _numpy(layer.bkv)
    out = []
    for row, sequence in enumerate(reads):
        own = slice(_starts(lengths)[row], _starts(lengths)[row] + lengths[row])
        begin, count = _starts(encoded_lengths)[sequence], encoded_lengths[sequence]
        theirs = kv[begin : begin + count]
        seen = np.ones((lengths[row], count), bool)
        attended = _dense(q[own], theirs[:, :, 0], theirs[:, :, 1], seen)
        attended = attended.reshape(lengths[row], 2, 4, 16)
        out.append(np.einsum("tkgd,kgde->te", attended, _numpy(layer.wo)) + _numpy(layer.bo))
    return np.concatenate(out)


def test_a_batch_that_writes_nothing_cannot_write():
    """Self-attention with a cross batch raises an error that says so."""
    config, pages = _config(2, 2), _Pages.of(1, 8, 0)
    lengths = np.array([3])
    batch = pages.batch(lengths, _rows("cross", lengths, lengths, pages.table))
    with pytest.raises(ValueError, match="page and offset are None"):
        pages.cache(config).write(0, jnp.zeros((3, 2, 2, 16)), replace(batch, page=None))
