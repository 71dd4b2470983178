"""Paged attention on NVIDIA GPUs from sm_80 on: Pallas kernels compiled by Triton.

Three kernels, *tile*, *split* and *merge*, share a batch by the work items of `planner.plan`. They
view the whole cache as [layers * pages, ...] and copy none of it. Their softmax is online, in
float32 and to base 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Float32

from jaxserve.kernels import gpu
from jaxserve.kernels.paged_attention.operands import AttentionCall, Rows
from jaxserve.kernels.paged_attention.planner import Launch, Plan, Tiling

_DTYPES = ("float32", "bfloat16", "float16")
_PAGE_DTYPES = (*_DTYPES, "float8_e4m3fn", "int8")
_MAX_WIDTH = 256


def paged_attention(
    call: AttentionCall, *, interpret: bool = False
) -> Float[Array, "tokens q_heads head_dim"]:
    """Implement `api.paged_attention`, writing the output over the queries where it can."""
    if not interpret:
        gpu.require_triton()
    q, plan = call.q, call.plan
    if call.distance_bias is not None:
        raise NotImplementedError("it has no bias by distance")
    _check_types(q, call.k_pages, call.sliding_window)
    if plan is None:
        raise NotImplementedError("it needs a plan of the batch; pass plan=")
    gpu.require_addressable(call.k_pages, call.v_pages)
    layers, num_pages, kv_heads, page_size, head_dim = call.k_pages.shape
    tiling = plan.tiling
    tiling.check_heads(q.shape[1], kv_heads)

    def flat(pages: jax.Array | None) -> jax.Array | None:
        return None if pages is None else pages.reshape(layers * num_pages, *pages.shape[2:])

    operands = Operands(
        counts=plan.counts,
        layer=jnp.asarray(call.layer, jnp.int32).reshape(1),
        rows=_kernel_rows(call.rows, is_decode=call.is_decode),
        k=flat(call.k_pages),
        v=flat(call.v_pages),
        k_scales=flat(call.k_scales),
        v_scales=flat(call.v_scales),
        slopes=None if call.alibi_slopes is None else call.alibi_slopes.astype(jnp.float32),
        sinks=None if call.sinks is None else call.sinks.astype(jnp.float32),
    )
    launches = tiling.launches_for(
        q.dtype,
        has_alibi=call.alibi_slopes is not None,
        has_window=call.sliding_window is not None,
        has_cap=call.soft_cap is not None,
    )
    kernels = Kernels(
        tiling=tiling,
        block_keys=launches.block_keys,
        scale=call.scale,
        sliding_window=call.sliding_window,
        soft_cap=call.soft_cap,
        kv_heads=kv_heads,
        head_dim=head_dim,
        num_pages=num_pages,
        page_size=page_size,
        interpret=interpret,
    )
    out = q
    if len(plan.tiles):
        (out,) = kernels.call(tile_kernel, plan.tiles, operands, out, launches.tile)
    if len(plan.splits):
        shape = (plan.num_partials, kv_heads)
        out, values, sums = kernels.call(
            split_kernel,
            plan.splits,
            operands,
            out,
            launches.split,
            (*shape, tiling.split_rows, head_dim),
            (*shape, 2, tiling.split_rows),
        )
        partials = (operands.counts, operands.rows, values, sums, operands.sinks)
        (out,) = kernels.call(merge_kernel, plan.merges, partials, out, launches.merge)
    return out


def merge(
    plan: Plan,
    rows: Rows,
    values: Float32[Array, "partials kv_heads head_dim split_rows"],
    sums: Float32[Array, "partials kv_heads 2 split_rows"],
    out: Float[Array, "tokens q_heads head_dim"],
    *,
    is_decode: bool,
    interpret: bool,
) -> Float[Array, "tokens q_heads head_dim"]:
    """Return `out` with the partial results of another split kernel merged.

    `sums` are the maxima, to base 2 and whole numbers, and the sums.
    """
    tiling = plan.tiling
    kernels = Kernels(
        tiling=tiling,
        kv_heads=values.shape[1],
        head_dim=values.shape[2],
        interpret=interpret,
        is_turned=True,
    )
    partials = (plan.counts, _kernel_rows(rows, is_decode=is_decode), values, sums, None)
    (merged,) = kernels.call(merge_kernel, plan.merges, partials, out, tiling.launches.merge)
    return merged


def _kernel_rows(rows: Rows, *, is_decode: bool) -> KernelRows:
    return KernelRows(
        query_start=None if is_decode else rows.query_start,
        query_length=rows.query_length,
        first_position=rows.first_position,
        context_length=rows.context_length,
        page_table=rows.page_table,
    )


def _check_types(q: jax.Array, pages: jax.Array, sliding_window: int | None) -> None:
    if str(q.dtype) not in _DTYPES or str(pages.dtype) not in _PAGE_DTYPES:
        raise NotImplementedError(
            f"it serves queries in one of {_DTYPES} and pages in one of {_PAGE_DTYPES}, not "
            f"{q.dtype} and {pages.dtype}"
        )
    target = gpu.target()
    if str(pages.dtype).startswith("float8") and target and target.capability < (8, 9):
        raise NotImplementedError(
            f"float8 pages need sm_89 or newer, not compute capability {target.capability}"
        )
    if q.shape[2] > _MAX_WIDTH:
        raise NotImplementedError(f"it serves head_dim up to {_MAX_WIDTH}, not {q.shape[2]}")
    if sliding_window is not None and sliding_window < 1:
        raise NotImplementedError(f"a sliding window of {sliding_window} sees nothing")


# Used for minus infinity: 2 ** (_MASKED - maximum) is 0, and _MASKED - _MASKED is not NaN.
_MASKED = -1e30
_MIN_WIDTH = 16
# Rows of partial results that the merge kernel reads per iteration.
_MERGED_ROWS = 128

# Maximum [rows], sum [rows] and weighted values [rows, width] of an unfinished softmax. Maxima are
# rounded up to whole numbers, so that parts are scaled by powers of two, which is exact: a merge
# has the same bits whether the compiler fuses multiplication and addition or not.
Softmax = tuple[jax.Array, jax.Array, jax.Array]


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KernelRows:
    """`Rows` as the kernels take them: arrays in the call, references in a kernel."""

    query_start: Any  # int32 [rows], or None where row i has one query, the i-th
    query_length: Any  # int32 [rows]
    first_position: Any  # int32 [rows]
    context_length: Any  # int32 [rows]
    page_table: Any  # int32 [rows, row_pages]


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Operands:
    """The inputs of the tile and the split kernel: arrays in the call, references in a kernel."""

    counts: Any  # int32 [3]
    layer: Any  # int32 [1]
    rows: Any  # `KernelRows`
    k: Any  # [layers * pages, kv_heads, page_size, head_dim]
    v: Any
    k_scales: Any  # float32 [layers * pages, kv_heads, page_size], or None
    v_scales: Any
    slopes: Any  # float32 [q_heads], or None
    sinks: Any  # float32 [q_heads], or None


@final
@dataclass(frozen=True)
class Kernels:
    """The static parameters of the kernels; the merge kernel needs those without a default.

    With `is_turned`, values of partial results are [partials, kv_heads, head_dim, split_rows].
    """

    tiling: Tiling
    kv_heads: int
    head_dim: int
    interpret: bool
    block_keys: int = 0
    scale: float = 1.0
    sliding_window: int | None = None
    soft_cap: float | None = None
    num_pages: int = 0
    page_size: int = 0
    is_turned: bool = False

    @property
    def width(self) -> int:
        """head_dim rounded up to a power of two."""
        return max(_MIN_WIDTH, gpu.power_of_two(self.head_dim))

    def call(
        self,
        kernel: Callable[..., None],
        items: jax.Array,
        operands: Any,
        out: jax.Array,
        launch: Launch,
        *partials: tuple[int, ...],
    ) -> list[jax.Array]:
        """Call a kernel; return `out`, written in place, and float32 arrays shaped `partials`."""
        is_tile = kernel is tile_kernel
        programs = self.tiling.tile_grid if is_tile else self.tiling.split_grid
        num_inputs = len(jax.tree.leaves((items, operands)))
        return pl.pallas_call(
            partial(kernel, self),
            grid=(programs, self.kv_heads),
            out_shape=[
                jax.ShapeDtypeStruct(out.shape, out.dtype),
                *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in partials),
            ],
            input_output_aliases={num_inputs: 0},
            compiler_params=triton.CompilerParams(
                num_warps=launch.num_warps, num_stages=launch.num_stages
            ),
            interpret=self.interpret,
            name=f"paged_attention_{kernel.__name__.removesuffix('_kernel')}",
        )(items, operands, out)

    def for_each_item(self, num_items: jax.Array, body: Callable[[jax.Array], None]) -> None:
        program, programs = pl.program_id(0), pl.num_programs(0)

        def one(index: jax.Array, _: None) -> None:
            body(program + index * programs)

        lax.fori_loop(0, (num_items - program + programs - 1) // programs, one, None)


@final
class _Queries:
    """An item's queries as rows of the matrix products: `group` heads of each, then padding.

    Attributes:
      kv_head: the KV head of all rows.
      head: int32 [rows], query heads.
      is_used: bool [rows], False for padding.
      position: int32 [rows].
      begin, end: range of positions of the keys that at least one row sees.
      at, mask: indices into [tokens, q_heads, head_dim] and their mask, [rows, width].
    """

    def __init__(
        self, kernels: Kernels, kv_head: Any, num_rows: int, items_ref: Any, item: Any, rows: Any
    ):
        row, first_query, num_queries = (items_ref[item, column] for column in range(3))
        group = kernels.tiling.group
        # The row may have shrunk or ended since the plan was made.
        count = jnp.clip(rows.query_length[row] - first_query, 0, num_queries)
        number = jnp.arange(num_rows, dtype=jnp.int32)
        first = rows.first_position[row] + first_query
        self.row = row
        self.is_used = number < count * group
        self.kv_head = kv_head
        self.head = kv_head * group + number % group
        self.position = first + number // group
        end = jnp.minimum(first + count, rows.context_length[row])
        self.end = jnp.where(count > 0, jnp.maximum(end, 0), 0)
        window = kernels.sliding_window
        self.begin = jnp.int32(0) if window is None else jnp.maximum(first - window + 1, 0)
        start = row if rows.query_start is None else rows.query_start[row]
        token = start + first_query + number // group
        lane = jnp.arange(kernels.width, dtype=jnp.int32)
        self.at = (token[:, None], self.head[:, None], lane[None, :])
        self.mask = self.is_used[:, None] & (lane < kernels.head_dim)[None, :]

    def store(self, out_ref: Any, sinks_ref: Any, softmax: Softmax, mask: Any = True) -> None:
        """Write the queries' output; zeros for queries that see no key."""
        maximum, total, values = softmax
        if sinks_ref is not None:
            sinks = triton.load(sinks_ref.at[self.head], mask=self.is_used, other=0.0)
            total = total + jnp.exp2(sinks * math.log2(math.e) - maximum)
        out = values / jnp.where(total == 0.0, 1.0, total)[:, None]
        triton.store(out_ref.at[self.at], out.astype(out_ref.dtype), mask=self.mask & mask)


def _nothing(num_rows: int, width: int) -> Softmax:
    return (
        jnp.full((num_rows,), _MASKED, jnp.float32),
        jnp.zeros((num_rows,), jnp.float32),
        jnp.zeros((num_rows, width), jnp.float32),
    )


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Return exactly 2 ** exponent for float32 whole numbers <= 0; 0 for subnormal results."""
    biased = jnp.maximum(exponent, -127.0).astype(jnp.int32) + 127
    return lax.bitcast_convert_type(biased << 23, jnp.float32)


def _merged(one: Softmax, other: Softmax) -> Softmax:
    """Merge two parts of a softmax; the result is exactly `one` if `other` has no keys."""
    maximum = jnp.maximum(one[0], other[0])
    keep, add = _power_of_two(one[0] - maximum), _power_of_two(other[0] - maximum)
    return (
        maximum,
        one[1] * keep + other[1] * add,
        one[2] * keep[:, None] + other[2] * add[:, None],
    )


def _attend(
    kernels: Kernels, queries: _Queries, operands: Any, given: Any
) -> Callable[[jax.Array, jax.Array], Softmax]:
    """Return a function from (begin, end) to the queries' softmax over keys in that range.

    `given` is the output before the kernel, which has the queries. An item reads its own queries
    before it overwrites them, and no other item reads them.
    """
    block, page_size = kernels.block_keys, kernels.page_size
    q = triton.load(given.at[queries.at], mask=queries.mask, other=0.0)
    num_rows, width = q.shape
    lane = jnp.arange(width, dtype=jnp.int32)
    head = queries.kv_head
    first_page = operands.layer[0] * kernels.num_pages
    exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    dot = partial(jnp.dot, precision=exact, preferred_element_type=jnp.float32)
    slopes = None
    if operands.slopes is not None:
        slopes = triton.load(operands.slopes.at[queries.head], mask=queries.is_used, other=0.0)

    def over(begin: jax.Array, end: jax.Array) -> Softmax:
        def one_block(index: jax.Array, softmax: Softmax) -> Softmax:
            maximum, total, values = softmax
            key = index * block + jnp.arange(block, dtype=jnp.int32)
            exists = key < end
            page = triton.load(
                operands.rows.page_table.at[queries.row, key // page_size], mask=exists, other=0
            )
            page, offset = first_page + page, key % page_size
            at = (page[:, None], head, offset[:, None], lane[None, :])
            mask = exists[:, None] & (lane < kernels.head_dim)[None, :]

            def scales(ref: Any) -> jax.Array:
                return triton.load(ref.at[page, head, offset], mask=exists, other=0.0)[None, :]

            def load(ref: Any) -> jax.Array:
                zero = 0 if ref.dtype == jnp.int8 else 0.0
                return triton.load(ref.at[at], mask=mask, other=zero).astype(q.dtype)

            k = load(operands.k)
            logits = dot(q, k.T) * kernels.scale
            if operands.k_scales is not None:
                logits = logits * scales(operands.k_scales)
            if kernels.soft_cap is not None:
                logits = kernels.soft_cap * jnp.tanh(logits / kernels.soft_cap)
            distance = key[None, :] - queries.position[:, None]
            if slopes is not None:
                logits = logits + slopes[:, None] * distance.astype(jnp.float32)
            seen = (exists & (key >= begin))[None, :] & (distance <= 0)
            if kernels.sliding_window is not None:
                seen = seen & (distance > -kernels.sliding_window)
            logits = jnp.where(seen, logits * math.log2(math.e), _MASKED)
            new = jnp.maximum(maximum, jnp.ceil(jnp.max(logits, axis=1)))
            weights = jnp.where(seen, jnp.exp2(logits - new[:, None]), 0.0)
            kept = _power_of_two(maximum - new)
            total = total * kept + jnp.sum(weights, axis=1)
            v = load(operands.v)
            if operands.v_scales is not None:
                weights = weights * scales(operands.v_scales)
            return new, total, values * kept[:, None] + dot(weights.astype(q.dtype), v)

        last = (end + block - 1) // block
        return lax.fori_loop(begin // block, last, one_block, _nothing(num_rows, width))

    return over


def tile_kernel(
    kernels: Kernels,
    items_ref: Any,  # int32 [tiles, 3]
    operands: Operands,
    given_ref: Any,  # `out_ref` before
    out_ref: Any,  # [tokens, q_heads, head_dim]
) -> None:
    head, num_rows = pl.program_id(1), kernels.tiling.tile_rows

    def one(item: jax.Array) -> None:
        queries = _Queries(kernels, head, num_rows, items_ref, item, operands.rows)
        softmax = _attend(kernels, queries, operands, given_ref)(queries.begin, queries.end)
        queries.store(out_ref, operands.sinks, softmax)

    kernels.for_each_item(operands.counts[0], one)


def split_kernel(
    kernels: Kernels,
    items_ref: Any,  # int32 [splits, 6]
    operands: Operands,
    given_ref: Any,  # `out_ref` before
    out_ref: Any,  # [tokens, q_heads, head_dim]
    values_ref: Any,  # [partials, kv_heads, split_rows, head_dim]
    sums_ref: Any,  # [partials, kv_heads, 2, split_rows]: maximum, sum
) -> None:
    split_keys, num_rows = kernels.tiling.split_keys, kernels.tiling.split_rows
    head = pl.program_id(1)
    number = jnp.arange(num_rows, dtype=jnp.int32)
    lane = jnp.arange(kernels.width, dtype=jnp.int32)

    def one(item: jax.Array) -> None:
        begin, end, first_partial = (items_ref[item, column] for column in range(3, 6))
        is_direct = first_partial < 0
        queries = _Queries(kernels, head, num_rows, items_ref, item, operands.rows)
        attend = _attend(kernels, queries, operands, given_ref)

        def one_split(split: jax.Array, softmax: Softmax) -> Softmax:
            new = attend(
                jnp.maximum(split * split_keys, queries.begin),
                jnp.minimum((split + 1) * split_keys, queries.end),
            )
            index = first_partial + split - begin
            here = values_ref.at[index, head, number[:, None], lane[None, :]]
            triton.store(here, new[2], mask=queries.mask & ~is_direct)
            for column in range(2):
                here = sums_ref.at[index, head, column, number]
                triton.store(here, new[column], mask=queries.is_used & ~is_direct)
            return _merged(softmax, new)

        softmax = lax.fori_loop(begin, end, one_split, _nothing(num_rows, kernels.width))
        queries.store(out_ref, operands.sinks, softmax, is_direct)

    kernels.for_each_item(operands.counts[1], one)


def merge_kernel(
    kernels: Kernels,
    items_ref: Any,  # int32 [merges, 5]
    operands: Any,  # counts, rows, the partial results as above, and sinks
    _: Any,
    out_ref: Any,  # [tokens, q_heads, head_dim]
) -> None:
    counts_ref, rows, values_ref, sums_ref, sinks_ref = operands
    num_rows, head = kernels.tiling.split_rows, pl.program_id(1)
    at_once = max(1, _MERGED_ROWS // num_rows)
    number = jnp.arange(num_rows, dtype=jnp.int32)
    lane = jnp.arange(kernels.width, dtype=jnp.int32)

    def one(item: jax.Array) -> None:
        first_partial, num_partials = (items_ref[item, column] for column in range(3, 5))
        queries = _Queries(kernels, head, num_rows, items_ref, item, rows)

        def read(offset: jax.Array) -> Softmax:
            exists, index = offset < num_partials, first_partial + offset
            used = queries.is_used & exists
            at = number[:, None], lane[None, :]
            here = values_ref.at[(index, head, *(reversed(at) if kernels.is_turned else at))]
            return (
                triton.load(sums_ref.at[index, head, 0, number], mask=used, other=_MASKED),
                triton.load(sums_ref.at[index, head, 1, number], mask=used, other=0.0),
                triton.load(here, mask=queries.mask & exists, other=0.0),
            )

        def several(index: jax.Array, softmax: Softmax) -> Softmax:
            first = index * at_once
            for part in [read(first + i) for i in range(at_once)]:
                softmax = _merged(softmax, part)
            return softmax

        rounds = (num_partials + at_once - 1) // at_once
        softmax = lax.fori_loop(0, rounds, several, _nothing(num_rows, kernels.width))
        queries.store(out_ref, sinks_ref, softmax)

    kernels.for_each_item(counts_ref[2], one)
