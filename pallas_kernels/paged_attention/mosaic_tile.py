"""The tile kernel for Hopper GPUs, in Pallas' Mosaic GPU dialect.

A program has three warpgroups. One copies pages to shared memory by TMA, a page a copy and the
pages of a block of keys on one barrier, as far ahead as there is room. Two attend, each with half
of a tile's queries and over the same keys; they take turns, so that one's softmax runs beside the
other's matrix products (FlashAttention-3, arXiv:2407.08608, section 3.1).

Rows of a product are `group` query heads of some queries, head after head. They come and go
through shared memory that is neither tiled nor swizzled: so a tile may begin at any token of the
batch, and end at any by storing powers of two of tokens. What is tiled is copied in whole pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from pallas_kernels.paged_attention.mosaic_attending import Attending
from pallas_kernels.paged_attention.mosaic_memory import (
    ATTENDING,
    ITEM_COLUMNS,
    ROWS,
    Item,
    Memory,
    ceil_div,
    rows_of,
)

_COPYING = ATTENDING
# Of a thread, in each role; together all that a multiprocessor has.
_REGISTERS = (240, 24)


@final
@dataclass(frozen=True, kw_only=True)
class TileKernel:
    """What is compiled in.

    Attributes:
      block_keys: keys that are attended to at a time.
      part_keys: keys of one copy: a page's, or a block's where that is less.
      num_stages: blocks that shared memory holds.
      programs: that run at once.
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
        """Queries of a warpgroup, at most."""
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
        """`out` with the items' queries attended for; the arguments as `Memory` has them.

        `k_pages` and `v_pages` are [pages, kv_heads, page_size, head_dim], of all layers.
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
        shared = partial(mosaic.SMEM, dtype=self.dtype)
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
        # Since JAX 0.11.
        return mosaic.InterpretGPUParams(detect_races=True)  # pyright: ignore

    def _body(self, *arrays: Any, **shared: Any) -> None:
        memory = Memory(*arrays, **shared)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < ATTENDING)
        def attending() -> None:
            mosaic.set_max_registers(_REGISTERS[0], action="increase")
            Attending(self, memory, warpgroup).run()

        @pl.when(warpgroup == _COPYING)
        def copying() -> None:
            mosaic.set_max_registers(_REGISTERS[1], action="decrease")
            _Copying(self, memory).run()

    def for_each_item(
        self, memory: Memory, body: Callable[[jax.Array, Item, jax.Array], jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Call `body` with every item of this program; how many they were, and what it left.

        `body` takes the item's number in this program, the item and how many blocks there were
        before; it returns how many there are after it. Programs take items in turn, every other
        time from last to first: as the longest come first, all have about the same.
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
        """First block of keys that any of the item's queries sees, and one past the last."""
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
        # Barriers are left as they were found.
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
        """Where the parts of a block lie; past the last one, that one again."""
        kernel, memory = self.kernel, self.memory
        num_parts = kernel.block_keys // kernel.part_keys

        def place(i: int) -> jax.Array:
            part = lax.min(block * num_parts + i, last)
            page = memory.page_table[item.row, lax.div(part, kernel.page_parts)]
            head = (memory.meta[1] + page) * kernel.kv_heads + item.kv_head
            return head * kernel.page_parts + lax.rem(part, kernel.page_parts)

        return [place(i) for i in range(num_parts)]
