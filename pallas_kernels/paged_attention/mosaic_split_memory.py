"""The memory that the warpgroups of the split kernel share, its sizes and its work item."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.mosaic_memory import ceil_div


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
        """Maximum number of queries of an item."""
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
        """Call `body` with every item of this program; return their number and that of blocks.

        `body` takes the item's number in this program, the item, and the number of blocks before
        it; it returns the number of blocks after it.
        """
        program, programs = lax.axis_index("program"), self.programs
        total = memory.counts[1] * self.kv_heads
        num_items = lax.max(ceil_div(total - program, programs), 0)

        def one(number: jax.Array, blocks: jax.Array) -> jax.Array:
            return body(number, self._item(memory, number * programs + program), blocks)

        return num_items, lax.fori_loop(jnp.int32(0), num_items, one, jnp.int32(0))

    def _item(self, memory: SplitMemory, index: jax.Array) -> SplitItem:
        """Return an item for the present rows, which may have shrunk or ended since the plan."""
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
