"""The tile kernel for Hopper GPUs, in Pallas' Mosaic GPU dialect.

A program has three warpgroups. One copies pages to shared memory by TMA, one page per copy and one
barrier per block of keys, as far ahead as shared memory allows. Two attend, each for half of a
tile's queries, over the same keys. They alternate, so that the softmax of one overlaps the matrix
products of the other (FlashAttention-3, arXiv:2407.08608, section 3.1).

Rows of a product are `group` query heads of some queries, head after head. Queries and outputs pass
through shared memory that is neither tiled nor swizzled, so that a tile can begin at any token of
the batch; outputs are stored in powers of two of tokens, so that it can end at any token. Tiled
memory is filled in whole pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from jaxserve.kernels import versions
from jaxserve.kernels.paged_attention.planner import Warpgroups

# Rows of a warpgroup's matrix products, and the number of warpgroups that attend.
ROWS = 64
ATTENDING = Warpgroups.NUM

# Columns of an item.
ITEM_COLUMNS = ("row", "token", "count", "position", "begin", "end", "context")


@final
@dataclass(frozen=True)
class Memory:
    """A program's references to the arrays of the call and to shared memory."""

    meta: Any  # int32 [2]: number of items, the layer's first page
    items: Any  # int32 [items, len(ITEM_COLUMNS)]
    page_table: Any  # int32 [rows, pages]
    q: Any  # [tokens, q_heads, head_dim]
    k: Any  # [pages * kv_heads * parts, part_keys, head_dim]
    v: Any
    out: Any  # [tokens, q_heads, head_dim]
    arriving_q: Any  # [ATTENDING, ROWS, head_dim]
    leaving: Any  # [ATTENDING, ROWS, head_dim]
    tiled_q: Any  # [ATTENDING, ROWS, head_dim]
    k_blocks: Any  # [stages, block_keys, head_dim]
    v_blocks: Any
    q_is_full: Any  # barriers: [ATTENDING]
    q_is_free: Any
    k_is_full: Any  # [stages]
    v_is_full: Any
    k_is_free: Any
    v_is_free: Any
    turn: Any
    mended: Any


@final
@dataclass(frozen=True)
class Item:
    """The scalars of a work item, and the KV head that the program computes."""

    kv_head: Any
    row: Any
    token: Any
    count: Any
    position: Any
    begin: Any
    end: Any
    context: Any


def rows_of(part: int, size: int) -> Any:
    return pl.ds(part * size, size)


def ceil_div(x: jax.Array, y: int) -> jax.Array:
    return lax.div(x + (y - 1), y)


_COPYING = ATTENDING
# Registers per thread of an attending and of the copying warpgroup; all of a multiprocessor's.
_REGISTERS = (240, 24)


@final
@dataclass(frozen=True, kw_only=True)
class TileKernel:
    """The static parameters of the kernel, and its call.

    An iteration has `block_keys` keys, copied `part_keys` at a time (those of a page or of a block,
    whichever is fewer). Shared memory has `num_stages` blocks of keys, and as many of values. The
    grid has `programs` programs.
    """

    scale: float
    sliding_window: int | None
    soft_cap: float | None
    group: int
    kv_heads: int
    head_dim: int
    page_size: int
    block_keys: int
    num_stages: int
    programs: int
    dtype: Any
    interpret: bool

    @property
    def queries(self) -> int:
        """Maximum number of queries of a warpgroup."""
        return ROWS // self.group

    @property
    def part_keys(self) -> int:
        return min(self.page_size, self.block_keys)

    @property
    def page_parts(self) -> int:
        return self.page_size // self.part_keys

    def __call__(
        self,
        meta: jax.Array,
        items: jax.Array,
        page_table: jax.Array,
        q: jax.Array,
        k_pages: jax.Array,
        v_pages: jax.Array,
        out: jax.Array,
    ) -> jax.Array:
        """Return `out` with the output of the items' queries; see `Memory` for the arguments.

        `k_pages` and `v_pages` are [layers * pages, kv_heads, page_size, head_dim].
        """
        parts = (-1, self.part_keys, self.head_dim)
        written = jax.new_ref(out)
        mosaic.kernel(
            self._body,
            out_type=(),
            scratch_types=self._scratch(),
            grid=(self.programs,),
            grid_names=("program",),
            num_threads=ATTENDING + 1,
            thread_name="warpgroup",
            compiler_params=mosaic.CompilerParams(approx_math=True),
            interpret=self._interpreter(),
            kernel_name="paged_attention_mosaic_tile",
        )(meta, items, page_table, q, k_pages.reshape(parts), v_pages.reshape(parts), written)
        return written[...]

    def _scratch(self) -> dict[str, Any]:
        rows = (ATTENDING, ROWS, self.head_dim)
        block = (self.num_stages, self.block_keys, self.head_dim)
        tiled = (mosaic.TilingTransform((8, 64)), mosaic.SwizzleTransform(128))
        shared = partial(mosaic.SMEM, dtype=self.dtype)  # pyrefly: ignore[bad-argument-type]
        copies = self.block_keys // self.part_keys
        full = mosaic.Barrier(num_arrivals=copies, num_barriers=self.num_stages)
        free = mosaic.Barrier(num_arrivals=ATTENDING, num_barriers=self.num_stages)
        return dict(
            arriving_q=shared(rows),
            leaving=shared(rows),
            tiled_q=shared(rows, transforms=tiled),
            k_blocks=shared(block, transforms=tiled),
            v_blocks=shared(block, transforms=tiled),
            q_is_full=mosaic.Barrier(num_arrivals=self.group, num_barriers=ATTENDING),
            q_is_free=mosaic.Barrier(num_arrivals=ATTENDING),
            k_is_full=full,
            v_is_full=full,
            k_is_free=free,
            v_is_free=free,
            turn=mosaic.Barrier(num_arrivals=ATTENDING),
            mended=mosaic.Barrier(num_arrivals=ATTENDING),
        )

    def _interpreter(self) -> Any:
        if not self.interpret:
            return None
        return versions.mosaic_interpreter()

    def _body(self, *arrays: Any, **shared: Any) -> None:
        memory = Memory(*arrays, **shared)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < ATTENDING)
        def attending() -> None:
            mosaic.set_max_registers(_REGISTERS[0], action="increase")
            _Attending(self, memory, warpgroup).run()

        @pl.when(warpgroup == _COPYING)
        def copying() -> None:
            mosaic.set_max_registers(_REGISTERS[1], action="decrease")
            _Copying(self, memory).run()

    def for_each_item(
        self, memory: Memory, body: Callable[[jax.Array, Item, jax.Array], jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Call `body(number in this program, item, blocks before it)` with every item of this
        program.

        `body` returns the number of blocks after it. Return the numbers of items and of blocks.
        Programs take items round robin, in reverse order every second round, which balances a list
        with the longest item first.
        """
        program, programs = lax.axis_index("program"), self.programs
        total = memory.meta[0] * self.kv_heads

        def place(number: jax.Array) -> jax.Array:
            return lax.select(lax.rem(number, 2) == 1, programs - 1 - program, program)

        whole = lax.div(total, programs)
        more = place(whole) < lax.rem(total, programs)
        num_items = whole + more.astype(jnp.int32)

        def one(number: jax.Array, blocks: jax.Array) -> jax.Array:
            index = number * programs + place(number)
            item = lax.div(index, self.kv_heads)
            columns = (memory.items[item, column] for column in range(len(ITEM_COLUMNS)))
            return body(number, Item(lax.rem(index, self.kv_heads), *columns), blocks)

        return num_items, lax.fori_loop(jnp.int32(0), num_items, one, jnp.int32(0))

    def blocks(self, item: Item) -> tuple[jax.Array, jax.Array]:
        """Return the range of blocks of keys that at least one of the item's queries sees."""
        first = lax.div(item.begin, self.block_keys)
        return first, lax.max(first, ceil_div(item.end, self.block_keys))


@final
@dataclass(frozen=True)
class _Copying:
    """The warpgroup that fills shared memory."""

    kernel: TileKernel
    memory: Memory

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

    def _copy_item(self, number: jax.Array, item: Item, blocks: jax.Array) -> jax.Array:
        kernel, memory = self.kernel, self.memory
        pl.when(number > 0)(lambda: mosaic.barrier_wait(memory.q_is_free))
        for warpgroup in range(ATTENDING):
            tokens = pl.ds(item.token + warpgroup * kernel.queries, kernel.queries)
            for member in range(kernel.group):
                mosaic.copy_gmem_to_smem(
                    memory.q.at[tokens, item.kv_head * kernel.group + member],
                    memory.arriving_q.at[warpgroup, rows_of(member, kernel.queries)],
                    memory.q_is_full.at[warpgroup],
                )
        first, end = kernel.blocks(item)
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

    def _parts(self, item: Item, block: jax.Array, last: jax.Array) -> Sequence[jax.Array]:
        """Return the indices of a block's parts; those past the last part repeat the last."""
        kernel, memory = self.kernel, self.memory
        num_parts = kernel.block_keys // kernel.part_keys

        def place(i: int) -> jax.Array:
            part = lax.min(block * num_parts + i, last)
            page = memory.page_table[item.row, lax.div(part, kernel.page_parts)]
            head = (memory.meta[1] + page) * kernel.kv_heads + item.kv_head
            return head * kernel.page_parts + lax.rem(part, kernel.page_parts)

        return [place(i) for i in range(num_parts)]


_MASKED = -1e30
# JAX 0.10, on which these kernels do not run, has another signature.
_load: Any = mosaic.load
_LOG2_E = math.log2(math.e)

# Values [rows, head_dim], maximum [rows] and sum [rows] of an unfinished softmax.
Softmax = tuple[jax.Array, jax.Array, jax.Array]


@final
@dataclass(frozen=True)
class _Attending:
    """A warpgroup that computes attention for its half of each tile's queries."""

    kernel: TileKernel
    memory: Memory
    warpgroup: Any

    def run(self) -> None:
        self.kernel.for_each_item(self.memory, self._attend)
        mosaic.wait_smem_to_gmem(0)

    def _attend(self, number: jax.Array, item: Item, blocks: jax.Array) -> jax.Array:
        kernel, memory, mine = self.kernel, self.memory, self.warpgroup
        del number
        mosaic.barrier_wait(memory.q_is_full.at[mine])
        layout = mosaic.Layout.WGMMA
        memory.tiled_q[mine] = _load(memory.arriving_q.at[mine], layout=layout, optimized=False)
        mosaic.commit_smem()
        mosaic.barrier_arrive(memory.q_is_free)

        first, end = kernel.blocks(item)
        # From whole_begin to whole_end, every query sees every key of a block.
        whole_end = lax.div(lax.min(item.position + 1, item.end), kernel.block_keys)
        whole_begin = first
        if kernel.sliding_window is not None:
            hidden = lax.max(item.position + item.count - kernel.sliding_window, 0)
            whole_begin = lax.clamp(first, ceil_div(hidden, kernel.block_keys), end)
        whole_end = lax.clamp(whole_begin, whole_end, end)

        by_row = layout.reduce(1)
        softmax = (
            mosaic.layout_cast(jnp.zeros((ROWS, kernel.head_dim), jnp.float32), layout),
            mosaic.layout_cast(jnp.full((ROWS,), _MASKED, jnp.float32), by_row),
            mosaic.layout_cast(jnp.zeros((ROWS,), jnp.float32), by_row),
        )
        query = lax.rem(
            mosaic.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=by_row), kernel.queries
        )
        position = query + (item.position + mine * kernel.queries)
        before = blocks - first
        whole = partial(self._whole_block, before=before)
        edge = partial(self._edge_block, before=before, item=item, position=position)
        if kernel.sliding_window is not None:
            softmax = lax.fori_loop(first, whole_begin, edge, softmax)
        # The second warpgroup runs half a block behind the first.
        pl.when(mine == 1)(self._take_turns)
        softmax = lax.fori_loop(whole_begin, whole_end, whole, softmax)
        pl.when(mine == 0)(self._take_turns)
        softmax = lax.fori_loop(whole_end, end, edge, softmax)
        self._store(item, softmax)
        return blocks + (end - first)

    def _take_turns(self) -> None:
        mosaic.barrier_arrive(self.memory.turn)
        mosaic.barrier_wait(self.memory.turn)

    def _whole_block(self, block: jax.Array, softmax: Softmax, *, before: jax.Array) -> Softmax:
        """Attend to a block of keys that all queries see, alternating with the other warpgroup."""
        memory = self.memory
        stage = lax.rem(before + block, self.kernel.num_stages)
        mosaic.barrier_wait(memory.k_is_full.at[stage])
        logits = self._product(memory.k_blocks.at[stage], self._take_turns)
        mosaic.barrier_arrive(memory.k_is_free.at[stage])
        softmax, weights = self._weigh(*self._capped(logits), softmax)
        mosaic.barrier_arrive(memory.turn)
        mosaic.barrier_wait(memory.v_is_full.at[stage])
        mosaic.barrier_wait(memory.turn)
        softmax = self._add_product(softmax, weights, memory.v_blocks.at[stage])
        mosaic.barrier_arrive(memory.v_is_free.at[stage])
        return softmax

    def _edge_block(
        self,
        block: jax.Array,
        softmax: Softmax,
        *,
        before: jax.Array,
        item: Item,
        position: jax.Array,  # int32 [ROWS]
    ) -> Softmax:
        memory = self.memory
        stage = lax.rem(before + block, self.kernel.num_stages)
        mosaic.barrier_wait(memory.k_is_full.at[stage])
        logits, scale = self._capped(self._product(memory.k_blocks.at[stage]))
        mosaic.barrier_arrive(memory.k_is_free.at[stage])
        logits = self._masked(logits, item, block * self.kernel.block_keys, position)
        softmax, weights = self._weigh(logits, scale, softmax)
        mosaic.barrier_wait(memory.v_is_full.at[stage])
        self._mend(item, block, stage)
        softmax = self._add_product(softmax, weights, memory.v_blocks.at[stage])
        mosaic.barrier_arrive(memory.v_is_free.at[stage])
        return softmax

    def _product(self, keys: Any, meanwhile: Callable[[], None] = lambda: None) -> jax.Array:
        """Return queries times keys; `meanwhile` is called while the product runs."""

        def product(accumulator: Any) -> jax.Array:
            queries = self.memory.tiled_q.at[self.warpgroup]
            mosaic.wgmma(accumulator, queries, keys.transpose((1, 0)))
            meanwhile()
            return accumulator[...]

        return pl.run_scoped(product, mosaic.WGMMAAccumulatorRef((ROWS, keys.shape[0])))

    def _weigh(
        self, logits: jax.Array, scale: float, softmax: Softmax
    ) -> tuple[Softmax, jax.Array]:
        """Return the softmax, rescaled and with the weights' sum added, and the weights."""
        values, maximum, total = softmax
        new = lax.max(maximum, jnp.max(logits, axis=1) * scale)
        kept = jnp.exp2(maximum - new)
        weights = jnp.exp2(logits * scale - lax.broadcast_in_dim(new, logits.shape, [0]))
        values = values * lax.broadcast_in_dim(kept, values.shape, [0])
        total = total * kept + jnp.sum(weights, axis=1)
        rounded = weights.astype(self.kernel.dtype)
        values, new, total, rounded = lax.optimization_barrier((values, new, total, rounded))
        return (values, new, total), rounded

    def _capped(self, products: jax.Array) -> tuple[jax.Array, float]:
        """Return x and a factor such that x * factor are the logits in base 2."""
        kernel = self.kernel
        if kernel.soft_cap is None:
            return products, kernel.scale * _LOG2_E
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); the approximate tanh has eleven bits.
        powers = jnp.exp2(products * (2 * kernel.scale / kernel.soft_cap * _LOG2_E))
        root = lax.rsqrt(powers + 1.0)
        return 1.0 - 2.0 * root * root, kernel.soft_cap * _LOG2_E

    def _masked(
        self, logits: jax.Array, item: Item, first: jax.Array, position: jax.Array
    ) -> jax.Array:
        """Return logits with minus infinity for unseen keys.

        `first` is the position of the block's first key, `position` int32 [ROWS] that of the
        queries.
        """
        kernel, shape = self.kernel, logits.shape
        key = mosaic.broadcasted_iota(jnp.int32, shape, 1, layout=mosaic.Layout.WGMMA)
        last = lax.min(position, jnp.broadcast_to(item.end - 1, position.shape)) - first
        seen = key <= lax.broadcast_in_dim(last, shape, [0])
        if kernel.sliding_window is not None:
            hidden = position - (kernel.sliding_window + first)
            seen = seen & (key > lax.broadcast_in_dim(hidden, shape, [0]))
        return jnp.where(seen, logits, -jnp.inf)

    def _mend(self, item: Item, block: jax.Array, stage: jax.Array) -> None:
        """Zero the values past the context, which may be NaN; each warpgroup writes half."""
        kernel, memory = self.kernel, self.memory
        begin = block * kernel.block_keys
        # A warpgroup reads and writes at least 64 rows; smaller blocks are halved by columns.
        by_rows = kernel.block_keys >= ROWS * ATTENDING
        half = (kernel.block_keys if by_rows else kernel.head_dim) // ATTENDING

        def mend(i: int) -> None:
            mine = rows_of(i, half)
            place = memory.v_blocks.at[(stage, mine) if by_rows else (stage, slice(None), mine)]
            values = _load(place, layout=mosaic.Layout.WGMMA)
            key = mosaic.broadcasted_iota(jnp.int32, values.shape, 0, layout=mosaic.Layout.WGMMA)
            exists = key < item.context - begin - (i * half if by_rows else 0)
            place[...] = jnp.where(exists, values, jnp.zeros_like(values))

        @pl.when(begin + kernel.block_keys > item.context)
        def _() -> None:
            for i in range(ATTENDING):
                pl.when(self.warpgroup == i)(partial(mend, i))
            mosaic.commit_smem()
            mosaic.barrier_arrive(memory.mended)
            mosaic.barrier_wait(memory.mended)

    def _add_product(self, softmax: Softmax, weights: jax.Array, v: Any) -> Softmax:
        """Return the softmax with the weighted values added."""
        values, maximum, total = softmax
        if self.kernel.interpret:
            # The interpreter's wgmma needs both factors in shared memory. This is an ordinary read,
            # so a fence is needed before the next copy to the same memory.
            product = jnp.dot(weights, v[...], preferred_element_type=jnp.float32)
            mosaic.commit_smem()
            return values + product, maximum, total

        def add(accumulator: Any) -> None:
            mosaic.wgmma(accumulator, weights, v)

        summed: Any = pl.run_state(add)(mosaic.WGMMAAccumulatorRef.init(values))
        return summed, maximum, total

    def _store(self, item: Item, softmax: Softmax) -> None:
        """Write the output in pieces of powers of two; zeros for queries that see no key."""
        kernel, memory, mine = self.kernel, self.memory, self.warpgroup
        values, _, total = softmax
        inverse = 1.0 / jnp.where(total == 0.0, 1.0, total)
        out = values * lax.broadcast_in_dim(inverse, values.shape, [0])
        # Wait until the previous item's output has been read.
        mosaic.wait_smem_to_gmem(0, wait_read_only=True)
        memory.leaving[mine] = out.astype(kernel.dtype)
        mosaic.commit_smem()
        stored = mine * kernel.queries
        count = lax.clamp(0, item.count - stored, kernel.queries)
        done = jnp.int32(0)
        for size in _powers_of_two(kernel.queries):

            @pl.when((count & size) != 0)
            def store(size: int = size, done: jax.Array = done) -> None:
                tokens = pl.ds(item.token + stored + done, size)
                for member in range(kernel.group):
                    rows = pl.ds(member * kernel.queries + done, size)
                    mosaic.copy_smem_to_gmem(
                        memory.leaving.at[mine, rows],
                        memory.out.at[tokens, item.kv_head * kernel.group + member],
                    )

            done = done + (count & size)


def _powers_of_two(most: int) -> list[int]:
    """Return the powers of two from the largest that is at most `most` down to 1."""
    return [1 << power for power in reversed(range(most.bit_length()))]
