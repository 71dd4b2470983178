"""The split kernel for Hopper GPUs, in Pallas' Mosaic GPU dialect: rows of few queries.

It works through the same items as Triton's split kernel, and writes the same partial results, with
their values transposed. A program has two warpgroups. One copies pages to shared memory by TMA, one
page per copy and one barrier per block of keys, as far ahead as shared memory allows. The other
attends.

The operands of the products are swapped: keys, and then the dimensions of values, are the 64 rows
that a warpgroup's product has at least, and query heads of one KV head are its few columns. So
nearly no product is wasted on padding, and an unfinished softmax takes few registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from jaxserve.kernels import versions
from jaxserve.kernels.paged_attention.mosaic_tile import ceil_div, rows_of


@final
@dataclass(frozen=True)
class SplitMemory:
    """A program's references to the arrays of the call and to shared memory."""

    counts: Any  # int32 [3], see `Plan`
    layer: Any  # int32 [1]
    items: Any  # int32 [splits, 6], see `Plan`
    query_start: Any  # int32 [rows]
    query_length: Any
    first_position: Any
    context_length: Any
    page_table: Any  # int32 [rows, pages]
    q: Any  # [tokens, q_heads, head_dim], which may be `out`
    k: Any  # [layers * pages * kv_heads * parts, part_keys, head_dim]
    v: Any
    out: Any  # [tokens, q_heads, head_dim]
    values: Any  # float32 [partials, kv_heads, head_dim, columns]
    sums: Any  # float32 [partials, kv_heads, 2, columns]: maximum, sum
    arriving_q: Any  # [columns, head_dim]
    tiled_q: Any  # [columns, head_dim]
    weights: Any  # [columns, block_keys]
    k_blocks: Any  # [stages, block_keys, head_dim]
    v_blocks: Any
    leaving: Any  # [columns, head_dim]
    leaving_values: Any  # float32 [head_dim, columns]
    leaving_sums: Any  # float32 [2, columns]
    q_is_full: Any  # barriers
    q_is_free: Any
    k_is_full: Any  # [stages]
    v_is_full: Any
    k_is_free: Any
    v_is_free: Any


@final
@dataclass(frozen=True)
class SplitItem:
    """The scalars of a work item, and the KV head that the program computes.

    Attributes:
      token: the first query in the batch.
      begin, end: range of positions of the keys that at least one query sees.
      context: number of keys that exist.
      partial: the partial result of the first split; -1 for an item that writes the output.
    """

    kv_head: Any
    row: Any
    token: Any
    count: Any
    position: Any
    begin: Any
    end: Any
    context: Any
    first_split: Any
    end_split: Any
    partial: Any


@final
@dataclass(frozen=True, kw_only=True)
class SplitSizes:
    """The static parameters of the kernel, and how its items are taken.

    Attributes:
      columns: queries times group, then padding.
      block_keys: keys per loop iteration.
      part_keys: keys per copy: those of a page or of a block, whichever is fewer.
      num_stages: number of blocks of keys, and of values, in shared memory.
      programs: number of programs of the grid.
      num_pages: pages of a layer.
    """

    scale: float
    sliding_window: int | None
    soft_cap: float | None
    group: int
    columns: int
    kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    split_keys: int
    block_keys: int
    num_stages: int
    programs: int
    num_partials: int
    dtype: Any
    interpret: bool

    @property
    def queries(self) -> int:
        return self.columns // self.group

    @property
    def part_keys(self) -> int:
        return min(self.page_size, self.block_keys)

    @property
    def page_parts(self) -> int:
        return self.page_size // self.part_keys

    def for_each_item(
        self, memory: SplitMemory, body: Callable[[jax.Array, SplitItem, jax.Array], jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Call `body(number in this program, item, blocks before it)` with every item of this
        program.

        `body` returns the number of blocks after it. Return the numbers of items and of blocks.
        """
        program, programs = lax.axis_index("program"), self.programs
        total = memory.counts[1] * self.kv_heads
        num_items = lax.max(ceil_div(total - program, programs), 0)

        def one(number: jax.Array, blocks: jax.Array) -> jax.Array:
            return body(number, self._item(memory, number * programs + program), blocks)

        return num_items, lax.fori_loop(jnp.int32(0), num_items, one, jnp.int32(0))

    def _item(self, memory: SplitMemory, index: jax.Array) -> SplitItem:
        """Return an item for the current rows, which may have shrunk or ended since the plan."""
        place = lax.div(index, self.kv_heads)
        row, first, planned, first_split, end_split, own = (
            memory.items[place, column] for column in range(6)
        )
        count = lax.clamp(0, memory.query_length[row] - first, planned)
        position = memory.first_position[row] + first
        context = memory.context_length[row]
        end = lax.select(count > 0, lax.max(lax.min(position + count, context), 0), jnp.int32(0))
        begin = jnp.int32(0)
        if self.sliding_window is not None:
            begin = lax.max(position - (self.sliding_window - 1), 0)
        return SplitItem(
            kv_head=lax.rem(index, self.kv_heads),
            row=row,
            token=memory.query_start[row] + first,
            count=count,
            position=position,
            begin=lax.max(begin, first_split * self.split_keys),
            end=lax.min(end, end_split * self.split_keys),
            context=context,
            first_split=first_split,
            end_split=end_split,
            partial=own,
        )

    def blocks(self, begin: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the range of blocks that hold the keys of a range of positions."""
        first = lax.div(begin, self.block_keys)
        return first, lax.max(first, ceil_div(end, self.block_keys))


_ATTENDING, _COPYING = range(2)
# Fields of `SplitMemory` before the queries.
_NUM_STEERING = 8


@final
@dataclass(frozen=True)
class SplitKernel:
    sizes: SplitSizes

    def __call__(
        self,
        steering: tuple[jax.Array, ...],  # the first eight fields of `SplitMemory`
        q: jax.Array | None,  # None where `out` has the queries before
        k_pages: jax.Array,  # [layers * pages, kv_heads, page_size, head_dim]
        v_pages: jax.Array,
        out: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return `out` with the output of items that write it, and the partial results."""
        sizes = self.sizes
        parts = (-1, sizes.part_keys, sizes.head_dim)
        shape = (sizes.num_partials, sizes.kv_heads)
        written = jax.new_ref(out)
        values, sums = mosaic.kernel(
            self._body,
            out_type=(
                jax.ShapeDtypeStruct((*shape, sizes.head_dim, sizes.columns), jnp.float32),
                jax.ShapeDtypeStruct((*shape, 2, sizes.columns), jnp.float32),
            ),
            scratch_types=self._scratch(),
            grid=(sizes.programs,),
            grid_names=("program",),
            num_threads=2,
            thread_name="warpgroup",
            compiler_params=mosaic.CompilerParams(approx_math=True),
            interpret=self._interpreter(),
            kernel_name="paged_attention_mosaic_split",
        )(
            *steering,
            *(() if q is None else (q,)),
            k_pages.reshape(parts),
            v_pages.reshape(parts),
            written,
        )
        return written[...], values, sums

    def _scratch(self) -> dict[str, Any]:
        sizes = self.sizes
        rows = (sizes.columns, sizes.head_dim)
        block = (sizes.num_stages, sizes.block_keys, sizes.head_dim)
        tiled = (mosaic.TilingTransform((8, 64)), mosaic.SwizzleTransform(128))
        shared = partial(mosaic.SMEM, dtype=sizes.dtype)  # pyrefly: ignore[bad-argument-type]
        copies = sizes.block_keys // sizes.part_keys
        full = mosaic.Barrier(num_arrivals=copies, num_barriers=sizes.num_stages)
        free = mosaic.Barrier(num_arrivals=1, num_barriers=sizes.num_stages)
        return dict(
            arriving_q=shared(rows),
            tiled_q=shared(rows, transforms=tiled),
            weights=shared((sizes.columns, sizes.block_keys), transforms=tiled),
            k_blocks=shared(block, transforms=tiled),
            v_blocks=shared(block, transforms=tiled),
            leaving=shared(rows),
            leaving_values=mosaic.SMEM((sizes.head_dim, sizes.columns), dtype=jnp.float32),
            leaving_sums=mosaic.SMEM((2, sizes.columns), dtype=jnp.float32),
            q_is_full=mosaic.Barrier(num_arrivals=sizes.queries),
            q_is_free=mosaic.Barrier(num_arrivals=1),
            k_is_full=full,
            v_is_full=full,
            k_is_free=free,
            v_is_free=free,
        )

    def _interpreter(self) -> Any:
        if not self.sizes.interpret:
            return None
        return versions.mosaic_interpreter()

    def _body(self, *arrays: Any, **shared: Any) -> None:
        if len(arrays) + len(shared) < len(fields(SplitMemory)):
            steering, others = arrays[:_NUM_STEERING], arrays[_NUM_STEERING:]
            arrays = *steering, others[2], *others
        memory = SplitMemory(*arrays, **shared)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _ATTENDING)
        def attending() -> None:
            _SplitAttending(self.sizes, memory).run()

        @pl.when(warpgroup == _COPYING)
        def copying() -> None:
            _SplitCopying(self.sizes, memory).run()


@final
@dataclass(frozen=True)
class _SplitCopying:
    """The warpgroup that fills shared memory."""

    kernel: SplitSizes
    memory: SplitMemory

    def run(self) -> None:
        memory, stages = self.memory, self.kernel.num_stages
        num_items, blocks = self.kernel.for_each_item(memory, self._copy_item)
        # Every arrival is waited for, so that the barriers end in their initial state.
        pl.when(num_items > 0)(lambda: mosaic.barrier_wait(memory.q_is_free))
        for i in range(stages):

            @pl.when(blocks > i)
            def drain(i: int = i) -> None:
                stage = lax.rem(blocks - 1 - i, stages)
                mosaic.barrier_wait(memory.k_is_free.at[stage])
                mosaic.barrier_wait(memory.v_is_free.at[stage])

    def _copy_item(self, number: jax.Array, item: SplitItem, blocks: jax.Array) -> jax.Array:
        kernel, memory = self.kernel, self.memory
        pl.when(number > 0)(lambda: mosaic.barrier_wait(memory.q_is_free))
        heads = pl.ds(item.kv_head * kernel.group, kernel.group)
        last_query = lax.max(item.count - 1, 0)
        for query in range(kernel.queries):
            mosaic.copy_gmem_to_smem(
                memory.q.at[item.token + lax.min(last_query, query), heads],
                memory.arriving_q.at[rows_of(query, kernel.group)],
                memory.q_is_full,
            )
        first, end = kernel.blocks(item.begin, item.end)
        last_part = lax.div(item.end - 1, kernel.part_keys)

        def one_block(block: jax.Array, blocks: jax.Array) -> jax.Array:
            parts = self._parts(item, block, last_part)
            stage = lax.rem(blocks, kernel.num_stages)
            keys = (memory.k, memory.k_blocks, memory.k_is_full, memory.k_is_free)
            values = (memory.v, memory.v_blocks, memory.v_is_full, memory.v_is_free)
            for pages, shared, is_full, is_free in (keys, values):
                pl.when(blocks >= kernel.num_stages)(
                    partial(mosaic.barrier_wait, is_free.at[stage])
                )
                for i, part in enumerate(parts):
                    place = shared.at[stage, rows_of(i, kernel.part_keys)]
                    mosaic.copy_gmem_to_smem(pages.at[part], place, is_full.at[stage])
            return blocks + 1

        return lax.fori_loop(first, end, one_block, blocks)

    def _parts(self, item: SplitItem, block: jax.Array, last: jax.Array) -> list[jax.Array]:
        """Return the indices of a block's parts; those past the last part repeat the last."""
        kernel, memory = self.kernel, self.memory
        num_parts = kernel.block_keys // kernel.part_keys
        first_page = memory.layer[0] * kernel.num_pages

        def place(i: int) -> jax.Array:
            part = lax.min(block * num_parts + i, last)
            page = memory.page_table[item.row, lax.div(part, kernel.page_parts)]
            head = (first_page + page) * kernel.kv_heads + item.kv_head
            return head * kernel.page_parts + lax.rem(part, kernel.page_parts)

        return [place(i) for i in range(num_parts)]


_MASKED = -1e30
# JAX 0.10, on which these kernels do not run, has another signature.
_load: Any = mosaic.load
_LOG2_E = math.log2(math.e)

# Values [head_dim, columns], maximum [columns] and sum [columns] of an unfinished softmax. Maxima
# are rounded to whole numbers, so that parts are scaled by powers of two, as in `triton`.
Softmax = tuple[jax.Array, jax.Array, jax.Array]


@final
@dataclass(frozen=True)
class _SplitAttending:
    kernel: SplitSizes
    memory: SplitMemory

    def run(self) -> None:
        self.kernel.for_each_item(self.memory, self._attend)
        mosaic.wait_smem_to_gmem(0)

    def _attend(self, number: jax.Array, item: SplitItem, blocks: jax.Array) -> jax.Array:
        kernel, memory = self.kernel, self.memory
        del number
        mosaic.barrier_wait(memory.q_is_full)
        turned = memory.tiled_q.transpose((1, 0))
        turned[...] = _load(
            memory.arriving_q.transpose((1, 0)), layout=mosaic.Layout.WGMMA, optimized=False
        )
        mosaic.commit_smem()
        mosaic.barrier_arrive(memory.q_is_free)

        first, end = kernel.blocks(item.begin, item.end)
        by_column = mosaic.Layout.WGMMA.reduce(0)
        position = item.position + lax.div(
            mosaic.broadcasted_iota(jnp.int32, (kernel.columns,), 0, layout=by_column), kernel.group
        )
        one_block = partial(self._one_block, before=blocks - first, item=item, position=position)
        per_split = kernel.split_keys // kernel.block_keys

        def one_split(split: jax.Array, softmax: Softmax) -> Softmax:
            begin = lax.clamp(first, split * per_split, end)
            stop = lax.clamp(first, (split + 1) * per_split, end)
            values, maximum, totals = lax.fori_loop(
                begin, stop, one_block, self._nothing(by_key=True)
            )
            new = values, maximum, jnp.sum(totals, axis=0)
            pl.when(item.partial >= 0)(
                lambda: self._store_partial(item, item.partial + split - item.first_split, new)
            )
            return _merged(softmax, new)

        values, _, total = lax.fori_loop(
            item.first_split, item.end_split, one_split, self._nothing(by_key=False)
        )
        pl.when(item.partial < 0)(lambda: self._store(item, values, total))
        return blocks + (end - first)

    def _nothing(self, *, by_key: bool) -> Softmax:
        """Return a softmax without keys; its sum is [block_keys, columns] if `by_key`."""
        kernel, layout = self.kernel, mosaic.Layout.WGMMA
        by_column = layout.reduce(0)
        columns = (kernel.columns,)
        rows = (kernel.block_keys, *columns) if by_key else columns
        total = mosaic.layout_cast(jnp.zeros(rows, jnp.float32), layout if by_key else by_column)
        return (
            mosaic.layout_cast(jnp.zeros((kernel.head_dim, *columns), jnp.float32), layout),
            mosaic.layout_cast(jnp.full(columns, _MASKED, jnp.float32), by_column),
            total,
        )

    def _one_block(
        self,
        block: jax.Array,
        softmax: Softmax,  # its sum [block_keys, columns]
        *,
        before: jax.Array,
        item: SplitItem,
        position: jax.Array,  # int32 [columns]
    ) -> Softmax:
        kernel, memory = self.kernel, self.memory
        stage = lax.rem(before + block, kernel.num_stages)
        values, maximum, total = softmax
        mosaic.barrier_wait(memory.k_is_full.at[stage])
        logits = self._product(
            memory.k_blocks.at[stage], memory.tiled_q.transpose((1, 0)), kernel.block_keys
        )
        mosaic.barrier_arrive(memory.k_is_free.at[stage])
        logits = self._masked(self._capped(logits), item, block * kernel.block_keys, position)
        new = lax.max(maximum, jnp.max(logits, axis=0))
        new = lax.round(new, lax.RoundingMethod.TO_NEAREST_EVEN)
        kept = jnp.exp2(maximum - new)
        weights = jnp.exp2(logits - lax.broadcast_in_dim(new, logits.shape, [1]))
        total = total * lax.broadcast_in_dim(kept, total.shape, [1]) + weights
        # The product that read the weights before has ended.
        memory.weights.transpose((1, 0))[...] = weights.astype(kernel.dtype)
        mosaic.barrier_wait(memory.v_is_full.at[stage])
        self._mend(item, block, stage)
        mosaic.commit_smem()
        product = self._product(
            memory.v_blocks.at[stage].transpose((1, 0)),
            memory.weights.transpose((1, 0)),
            kernel.head_dim,
        )
        mosaic.barrier_arrive(memory.v_is_free.at[stage])
        values = values * lax.broadcast_in_dim(kept, values.shape, [1]) + product
        return values, new, total

    def _product(self, left: Any, right: Any, rows: int) -> jax.Array:
        """Return the float32 product of two references to shared memory, with `rows` rows."""

        def product(accumulator: Any) -> jax.Array:
            mosaic.wgmma(accumulator, left, right)
            return accumulator[...]

        return pl.run_scoped(product, mosaic.WGMMAAccumulatorRef((rows, self.kernel.columns)))

    def _capped(self, products: jax.Array) -> jax.Array:
        """Return the logits to base 2."""
        kernel = self.kernel
        if kernel.soft_cap is None:
            return products * (kernel.scale * _LOG2_E)
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); the approximate tanh has eleven bits.
        powers = jnp.exp2(products * (2 * kernel.scale / kernel.soft_cap * _LOG2_E))
        root = lax.rsqrt(powers + 1.0)
        return (1.0 - 2.0 * root * root) * (kernel.soft_cap * _LOG2_E)

    def _masked(
        self, logits: jax.Array, item: SplitItem, first: jax.Array, position: jax.Array
    ) -> jax.Array:
        """Return logits with minus infinity for unseen keys.

        `first` is the position of the block's first key, `position` int32 [columns] that of the
        queries.
        """
        kernel, shape = self.kernel, logits.shape
        key = mosaic.broadcasted_iota(jnp.int32, shape, 0, layout=mosaic.Layout.WGMMA)
        last = lax.min(position, jnp.broadcast_to(item.end - 1, position.shape)) - first
        seen = key <= lax.broadcast_in_dim(last, shape, [1])
        if kernel.sliding_window is not None:
            hidden = position - (kernel.sliding_window + first)
            seen = seen & (key > lax.broadcast_in_dim(hidden, shape, [1]))
        return jnp.where(seen, logits, -jnp.inf)

    def _mend(self, item: SplitItem, block: jax.Array, stage: jax.Array) -> None:
        """Zero the values past the context, which may be NaN."""
        kernel, memory = self.kernel, self.memory
        begin = block * kernel.block_keys

        @pl.when(begin + kernel.block_keys > item.context)
        def _() -> None:
            place = memory.v_blocks.at[stage]
            values = _load(place, layout=mosaic.Layout.WGMMA)
            key = mosaic.broadcasted_iota(jnp.int32, values.shape, 0, layout=mosaic.Layout.WGMMA)
            place[...] = jnp.where(key < item.context - begin, values, jnp.zeros_like(values))

    def _store_partial(self, item: SplitItem, index: jax.Array, softmax: Softmax) -> None:
        memory = self.memory
        values, maximum, total = softmax
        mosaic.wait_smem_to_gmem(0, wait_read_only=True)
        memory.leaving_values[...] = values
        memory.leaving_sums[0] = maximum
        memory.leaving_sums[1] = total
        mosaic.commit_smem()
        mosaic.copy_smem_to_gmem(memory.leaving_values, memory.values.at[index, item.kv_head])
        mosaic.copy_smem_to_gmem(memory.leaving_sums, memory.sums.at[index, item.kv_head])

    def _store(self, item: SplitItem, values: jax.Array, total: jax.Array) -> None:
        """Write the output; zeros for queries that see no key."""
        kernel, memory = self.kernel, self.memory
        inverse = 1.0 / jnp.where(total == 0.0, 1.0, total)
        out = values * lax.broadcast_in_dim(inverse, values.shape, [1])
        mosaic.wait_smem_to_gmem(0, wait_read_only=True)
        memory.leaving.transpose((1, 0))[...] = out.astype(kernel.dtype)
        mosaic.commit_smem()
        heads = pl.ds(item.kv_head * kernel.group, kernel.group)
        for query in range(kernel.queries):

            @pl.when(query < item.count)
            def store(query: int = query) -> None:
                mosaic.copy_smem_to_gmem(
                    memory.leaving.at[rows_of(query, kernel.group)],
                    memory.out.at[item.token + query, heads],
                )


def _merged(one: Softmax, other: Softmax) -> Softmax:
    """Merge two parts of a softmax; the result is exactly `one` if `other` has no keys."""
    maximum = lax.max(one[1], other[1])
    keep, add = jnp.exp2(one[1] - maximum), jnp.exp2(other[1] - maximum)
    shape = one[0].shape
    return (
        one[0] * lax.broadcast_in_dim(keep, shape, [1])
        + other[0] * lax.broadcast_in_dim(add, shape, [1]),
        maximum,
        one[2] * keep + other[2] * add,
    )
