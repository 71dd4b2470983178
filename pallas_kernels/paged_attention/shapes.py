"""Named shapes for the tests and the benchmarks of paged attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.paged_attention.operands import Rows


@final
@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """A ragged batch; `rows` are (number of queries, context length in tokens).

    The queries are the last tokens of the context. `page_table_width`, in pages, is raised to what
    the longest context needs.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    rows: tuple[tuple[int, int], ...]
    page_table_width: int = 0

    @property
    def is_decode(self) -> bool:
        return all(queries == 1 for queries, _ in self.rows)


def _decode_contexts(count: int, low: int, high: int) -> tuple[tuple[int, int], ...]:
    contexts = np.random.default_rng(0).integers(low, high, count)
    return tuple((1, int(context)) for context in contexts)


_SMOLLM2 = dict(num_heads=9, num_kv_heads=3, head_dim=64, page_size=32, page_table_width=64)
_TINY = dict(num_heads=4, num_kv_heads=2, head_dim=8, page_size=4)
_DECODE_32 = _decode_contexts(32, 300, 500)

# Small enough for the reference.
TEST_SHAPES = (
    AttentionShape(name="one_token", rows=((1, 1),), **_TINY),
    AttentionShape(name="decode", rows=((1, 1), (1, 4), (1, 5), (1, 37), (0, 0)), **_TINY),
    AttentionShape(name="prefill", rows=((29, 29), (0, 0)), **_TINY),
    AttentionShape(name="chunk", rows=((7, 31), (150, 163)), **_TINY, page_table_width=64),
    AttentionShape(name="mixed", rows=((1, 9), (12, 12), (0, 0), (1, 30), (70, 75)), **_TINY),
    AttentionShape(
        name="multi_query",
        num_heads=5,
        num_kv_heads=1,
        head_dim=16,
        page_size=8,
        rows=((4, 20), (1, 33)),
    ),
    AttentionShape(
        name="multi_head",
        num_heads=3,
        num_kv_heads=3,
        head_dim=16,
        page_size=1,
        rows=((1, 6), (5, 5)),
    ),
)

BENCHMARK_SHAPES = (
    AttentionShape(name="smollm2_decode_32", rows=_DECODE_32, **_SMOLLM2),
    AttentionShape(name="smollm2_prefill_256", rows=((256, 256),), **_SMOLLM2),
    AttentionShape(name="smollm2_prefill_512", rows=((512, 512),), **_SMOLLM2),
    AttentionShape(name="smollm2_mixed", rows=(*_DECODE_32[:31], (225, 600)), **_SMOLLM2),
)

_LLAMA3_8B = dict(num_heads=32, num_kv_heads=8, head_dim=128, page_size=32)
_LLAMA2_13B = dict(num_heads=40, num_kv_heads=40, head_dim=128, page_size=32)

# Timed on GPUs only. Decode: the batches and contexts that one device holds.
GPU_DECODE_SHAPES = (
    *(
        AttentionShape(
            name=f"llama3_8b_decode_{batch}x{context}", rows=((1, context),) * batch, **_LLAMA3_8B
        )
        for batch in (1, 8, 32, 128, 256)
        for context in (128, 1024, 4096, 16384, 65536, 131072)
        if batch * context <= 2**21
    ),
    AttentionShape(name="llama2_13b_decode_32x4096", rows=((1, 4096),) * 32, **_LLAMA2_13B),
    AttentionShape(
        name="llama3_8b_decode_ragged", rows=_decode_contexts(128, 100, 16000), **_LLAMA3_8B
    ),
)
GPU_PREFILL_SHAPES = tuple(
    AttentionShape(name=f"llama3_8b_prefill_{length}", rows=((length, length),), **_LLAMA3_8B)
    for length in (512, 1024, 4096, 16384)
)
GPU_MIXED_SHAPES = (
    AttentionShape(
        name="llama3_8b_mixed_64x4096_1024", rows=(*((1, 4096),) * 64, (1024, 1024)), **_LLAMA3_8B
    ),
    AttentionShape(name="llama3_8b_turn_20_of_32768", rows=((20, 32768),), **_LLAMA3_8B),
)


def make_inputs(
    shape: AttentionShape, seed: int, *, layers: int = 2, padding: int = 0
) -> tuple[jax.Array, jax.Array, jax.Array, Rows]:
    """Return random float32 `q`, `k_pages`, `v_pages`, and rows on scattered pages.

    Page 0, the null page, is unused; unused entries of the page tables name it. The last `padding`
    tokens are in no row.
    """
    random = np.random.default_rng(seed)
    needed = [-(-context // shape.page_size) for _, context in shape.rows]
    num_pages = 2 + sum(needed)
    pages = random.permutation(np.arange(1, num_pages))
    table = np.zeros((len(shape.rows), max(1, shape.page_table_width, *needed)), np.int32)
    used = 0
    for row, count in enumerate(needed):
        table[row, :count] = pages[used : used + count]
        used += count
    length = np.asarray([queries for queries, _ in shape.rows], np.int32)
    context = np.asarray([context for _, context in shape.rows], np.int32)
    rows = Rows(
        query_start=jnp.asarray(np.cumsum(length) - length, jnp.int32),
        query_length=jnp.asarray(length),
        first_position=jnp.asarray(context - length),
        context_length=jnp.asarray(context),
        page_table=jnp.asarray(table),
    )
    tokens = len(shape.rows) if shape.is_decode else int(length.sum()) + padding

    def normal(*size: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(size), jnp.float32)

    cache = (layers, num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
    return normal(tokens, shape.num_heads, shape.head_dim), normal(*cache), normal(*cache), rows
