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
# Registers per thread of an attending and of the copying warpgroup; all of a multiprocessor's.
_REGISTERS = (240, 24)


@final
@dataclass(frozen=True, kw_only=True)
class TileKernel:
    """The static parameters of the kernel, and its call.

    Attributes:
      block_keys: keys per loop iteration.
      part_keys: keys per copy: those of a page or of a block, whichever is fewer.
      num_stages: number of blocks of keys, and of values, in shared memory.
      programs: number of programs of the grid.
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
        # Since JAX 0.11.
        return mosaic.InterpretGPUParams(detect_races=True)  # pyrefly: ignore[missing-attribute]

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
        """Call `body` with every item of this program; return their number and that of blocks.

        `body` takes the item's number in this program, the item, and the number of blocks before
        it; it returns the number of blocks after it. Programs take items round robin, in reverse
        order every second round, which balances a list with the longest item first.
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
