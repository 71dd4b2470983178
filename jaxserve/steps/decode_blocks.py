"""The rows and tokens that an iteration of a decode loop computes."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxserve.core.config import EngineConfig
from jaxserve.models.batch import AttentionBatch
from jaxserve.steps.batches import DecodeWindow, attention_batch
from jaxserve.steps.encoding import visible_rows
from jaxserve.steps.sampling.slot_sampling import SlotSampling
from jaxserve.steps.slots import SlotState
from pallas_kernels.paged_attention import Plan


class Block(NamedTuple):
    """The tokens of an iteration, row after row: the newest one, and what is proposed behind it.

    Attributes:
      row, place: of each token; `place` is that behind the row's newest token.
      valid: False for padding.
      start, length: where the tokens of each row are; length 0 for an inert row.
    """

    row: Int32[Array, " tokens"]
    place: Int32[Array, " tokens"]
    valid: Bool[Array, " tokens"]
    start: Int32[Array, " rows"]
    length: Int32[Array, " rows"]


def block_of(
    live: Bool[Array, " rows"], proposed: Int32[Array, " rows"] | None, num_proposed: int
) -> Block:
    """Return the tokens of the live rows, with as many proposals of each.

    Args:
      num_proposed: of all rows together, at most.
    """
    num_rows = live.shape[0]
    length = live.astype(jnp.int32)
    if proposed is None:
        row = jnp.arange(num_rows)
        return Block(row, jnp.zeros(num_rows, jnp.int32), live, row, length)
    length += proposed
    end = jnp.cumsum(length)
    index = jnp.arange(num_rows + num_proposed)
    row = jnp.minimum(jnp.searchsorted(end, index, side="right"), num_rows - 1)
    start = end - length
    valid = index < end[-1]
    return Block(row, jnp.where(valid, index - start[row], 0), valid, start, length)


class WindowRows(NamedTuple):
    """What an iteration reads of a window's slots and does not change."""

    window: DecodeWindow
    page_table: Int32[Array, "rows row_pages"]
    sampling: SlotSampling
    encoded: Int32[Array, " rows"] | None
    adapter: Int32[Array, " rows"] | None

    @property
    def slot(self) -> Int32[Array, " rows"]:
        """The slot of each row."""
        return self.window.start + jnp.arange(self.window.most.shape[0])

    def part(self, leaf: Shaped[Array, " slots *entry"]) -> Shaped[Array, " rows *entry"]:
        """Return the window's part of an array of all slots."""
        return lax.dynamic_slice_in_dim(leaf, self.window.start, self.window.most.shape[0])

    def live(self, done: Bool[Array, " slots"]) -> Bool[Array, " rows"]:
        """Return which rows take part and have not ended."""
        return (self.window.most > 0) & ~self.part(done)


def rows_of(slots: SlotState, window: DecodeWindow) -> WindowRows:
    start, size = window.start, window.most.shape[0]
    read = slots.page_table, slots.sampling, slots.encoded, slots.adapter
    return WindowRows(
        window, *jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, size), read)
    )


def attention_of(
    slots: SlotState,
    window: WindowRows,
    block: Block,
    inputs: Float[Array, "tokens embed"] | None,
    attention_plan: Plan | None,
    config: EngineConfig,
    proposed: Int32[Array, "rows num"] | None,
) -> tuple[Int32[Array, " tokens"] | Float[Array, "tokens embed"], AttentionBatch]:
    """Return what a model computes for a block, and its attention batch.

    Args:
      proposed: tokens of the block's places from 1 on; None for a block without proposals.
    """
    newest = window.part(slots.length) - 1
    positions = jnp.minimum(newest[block.row] + block.place, config.max_context - 1)
    rows, cross_rows = visible_rows(
        config,
        window.encoded,
        query_start=block.start,
        query_length=block.length,
        first_position=jnp.where(block.length > 0, newest, 0),
        page_table=window.page_table,
    )
    attention = attention_batch(
        config,
        positions=positions,
        token_pages=window.page_table[block.row, positions // config.page_size],
        valid=block.valid,
        rows=rows,
        plan=attention_plan,
        max_query_length=1 if proposed is None else None,
        cross_rows=cross_rows,
        slot=window.slot,
        adapter=None if window.adapter is None else window.adapter[block.row],
    )
    if inputs is None:
        inputs = slots.tokens[window.slot, newest][block.row]
        if proposed is not None:
            others = proposed[block.row, jnp.maximum(block.place - 1, 0)]
            inputs = jnp.where(block.place > 0, others, inputs)
    return inputs, attention
