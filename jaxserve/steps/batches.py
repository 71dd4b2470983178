"""The rows that a step computes, as arrays, and the attention batch that follows from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxserve.core.config import EngineConfig
from jaxserve.memory.page_pool import NULL_PAGE
from jaxserve.models.batch import AttentionBatch, IncomingPages, KVCache
from jaxserve.models.decoder import Tap
from jaxserve.steps.probing import Probe
from jaxserve.steps.slots import SlotState
from pallas_kernels import Rows
from pallas_kernels.paged_attention import Plan

Params = Any


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeWindow:
    """The slots that a decode loop runs over, and how often."""

    start: Int32[Array, ""]
    # An upper bound; the loop ends earlier when all slots have ended.
    num_iterations: Int32[Array, ""]
    # Upper bound of new tokens of each slot from `start` on; 0 leaves the slot unchanged.
    most: Int32[Array, " rows"]
    verify_cost: Float32[Array, ""]  # see `StepPlan`


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixedBatch:
    """Rows of a mixed step; unused rows have length 0."""

    token_row: Int32[Array, " tokens"]  # row of each token; the number of slots for padding
    slot: Int32[Array, " slots"]
    start: Int32[Array, " slots"]  # an upper bound, see `where_slots_are`
    query_start: Int32[Array, " slots"]
    query_length: Int32[Array, " slots"]
    samples: Bool[Array, " slots"]  # rows that end at their slot's newest token


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChoosingRows:
    """Slots that choose tokens in a mixed step, some of them after several of its rows."""

    slot: Int32[Array, " rows"]  # the number of slots for padding
    # The row after which the slot's first token is chosen; its other rows follow it.
    first: Int32[Array, " rows"]
    num_proposed: Int32[Array, " rows"]  # the slot's newest tokens, if they are proposals


def where_slots_are(
    batch: MixedBatch, slots: SlotState
) -> tuple[MixedBatch, Bool[Array, " slots"]]:
    """Return the rows at their slots' real positions, and which of them are live.

    A plan is an upper bound. If a slot has fewer tokens than planned, a row that samples ends at
    its newest token, and a row that does not sample is inert.
    """
    length = slots.length[batch.slot]
    ends = jnp.where(batch.samples, length, batch.start + batch.query_length)
    start = jnp.maximum(ends - batch.query_length, 0)
    return replace(batch, start=start), ~slots.done[batch.slot] & (ends <= length)


def positions_and_slots(
    batch: MixedBatch,
) -> tuple[Int32[Array, " tokens"], Int32[Array, " tokens"]]:
    """Return position and slot of every token; padding has those of row 0's start."""
    is_padding = batch.token_row >= batch.slot.shape[0]
    row = jnp.where(is_padding, 0, batch.token_row)
    offset = jnp.arange(batch.token_row.shape[0]) - batch.query_start[row]
    return batch.start[row] + jnp.where(is_padding, 0, offset), batch.slot[row]


def attention_batch(
    config: EngineConfig,
    *,
    positions: Int32[Array, " tokens"],
    token_pages: Int32[Array, " tokens"],  # the page that each token's keys and values go to
    valid: Bool[Array, " tokens"],
    rows: Rows,
    plan: Plan | None,  # the plan of a kernel that needs one; None otherwise
    max_query_length: int | None = None,
    cross_rows: Rows | None = None,
    slot: Int32[Array, " rows"] | None = None,
    adapter: Int32[Array, " tokens"] | None = None,
) -> AttentionBatch:
    """Return the attention batch of the tokens; invalid ones write to the null page.

    Args:
      max_query_length: the largest of all rows; None if it is not known before the step.
      cross_rows: the rows of cross attention; None for a model without an encoder.
      slot: the slot of each row, for models with states in slots.
    """
    return AttentionBatch(
        positions=positions,
        page=jnp.where(valid, token_pages, NULL_PAGE),
        offset=positions % config.page_size,
        rows=rows,
        plan=plan,
        max_query_length=max_query_length,
        implementation=config.attention,
        cross_rows=cross_rows,
        slot=slot if config.has_slot_state else None,
        adapter=adapter,
    )


def tap(probe: Probe | None, rows: Int32[Array, " rows"]) -> Tap | None:
    """Return where the probe reads activations: at the tokens `rows`."""
    return None if probe is None else Tap(probe.layer, rows)


def tapped(
    model: Any,
    inputs: Int32[Array, " tokens"] | Float[Array, "tokens embed"],
    attention: AttentionBatch,
    cache: KVCache,
    where: Tap | None,
    incoming: IncomingPages | None = None,
) -> tuple[Float[Array, "tokens hidden"], KVCache, Float32[Array, "rows embed"] | None]:
    """Call `Decoder.tapped`; the activations that the probe reads are converted to float32."""
    hidden, cache, read = model.tapped(inputs, attention, cache, where, incoming)
    return hidden, cache, None if read is None else read.astype(jnp.float32)
