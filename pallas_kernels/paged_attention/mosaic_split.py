"""The split kernel for Hopper GPUs, in Pallas' Mosaic GPU dialect: rows of few queries.

It works through the same items as Triton's split kernel, and writes the same partial results, with
their values turned. A program has two warpgroups. One copies pages to shared memory by TMA, one
page per copy and one barrier per block of keys, as far ahead as shared memory allows. The other
attends.

The operands of the products are swapped: keys, and then the dimensions of values, are the 64 rows
that a warpgroup's product has at least, and query heads of one KV head are its few columns. So
nearly no product is wasted on padding, and an unfinished softmax takes few registers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from pallas_kernels.paged_attention.mosaic_memory import rows_of
from pallas_kernels.paged_attention.mosaic_split_attending import Attending
from pallas_kernels.paged_attention.mosaic_split_memory import SplitItem, SplitMemory, SplitSizes

_ATTENDING, _COPYING = range(2)
# Fields of `SplitMemory` before the queries.
_NUM_STEERING = 8


@final
@dataclass(frozen=True)
class SplitKernel:
    """A call of the kernel."""

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
        # Since JAX 0.11.
        return mosaic.InterpretGPUParams(detect_races=True)  # pyrefly: ignore[missing-attribute]

    def _body(self, *arrays: Any, **shared: Any) -> None:
        if len(arrays) + len(shared) < len(fields(SplitMemory)):
            steering, others = arrays[:_NUM_STEERING], arrays[_NUM_STEERING:]
            arrays = *steering, others[2], *others
        memory = SplitMemory(*arrays, **shared)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _ATTENDING)
        def attending() -> None:
            Attending(self.sizes, memory).run()

        @pl.when(warpgroup == _COPYING)
        def copying() -> None:
            _Copying(self.sizes, memory).run()


@final
@dataclass(frozen=True)
class _Copying:
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
