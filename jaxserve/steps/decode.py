"""Decoding on the device: a loop over a whole model, or one iteration of a stage.

A loop may speculate: an iteration computes a row's newest token and some that are proposed to
follow it (`steps.proposals`), and chooses the next token behind each of them. As long as that is
the one proposed, the choice behind it counts as well. So the tokens are those of a loop that does
not speculate, drawn ones too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from jaxserve.core.config import EngineConfig
from jaxserve.models.batch import KVCache
from jaxserve.models.decoder import Tap
from jaxserve.scheduling.plan import ProposalCount
from jaxserve.steps import slots as slot_edits
from jaxserve.steps.batches import DecodeWindow, Params, attention_batch, tap, tapped
from jaxserve.steps.encoding import counted_from, visible_rows
from jaxserve.steps.outputs import Outputs, count, no_outputs, record, with_reading
from jaxserve.steps.probing import Probe
from jaxserve.steps.proposals import look_up
from jaxserve.steps.sampling.sampler import sample
from jaxserve.steps.sampling.slot_sampling import SlotSampling
from jaxserve.steps.sampling.variants import Variant
from jaxserve.steps.slots import SlotState
from pallas_kernels.paged_attention import Plan


def decode_loop(
    params: Params,
    cache: KVCache,
    slots: SlotState,
    window: DecodeWindow,
    attention_plan: Plan | None,
    probe_params: Params,
    *,
    variant: Variant,
    num_proposed: int = 0,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
    probe: Probe | None,
) -> tuple[KVCache, SlotState, Outputs]:
    """Decode the slots of a window until its iterations are over or all have ended.

    Args:
      num_proposed: tokens that are proposed for a row in an iteration; static. Where it is 0 and
        the runtime speculates, the loop still counts how many proposals would have been right.
    """
    model = nnx.merge(graphdef, params)
    most = window.most
    num_rows, block = most.shape[0], 1 + num_proposed
    rows = _rows_of(slots, window)
    index = jnp.arange(num_rows)
    where = tap(probe, jnp.arange(num_rows * block))

    def live(done: Bool[Array, " slots"], outputs: Outputs) -> Bool[Array, " rows"]:
        return rows.live(done) & (outputs.num_tokens < most)

    def goes_on(carry: _Carry) -> Bool[Array, ""]:
        is_left = carry.iteration < window.num_iterations
        return is_left & live(carry.done, carry.outputs).any()

    def iterate(carry: _Carry) -> _Carry:
        before = replace(slots, tokens=carry.tokens, length=carry.length, done=carry.done)
        outputs = carry.outputs
        proposed = _proposed(before, rows, config, num_proposed)
        # Computed tokens of each row: the newest one, and proposals as far as its bound allows.
        room = jnp.where(live(before.done, outputs), most - outputs.num_tokens, 0)
        if proposed is not None:
            room = jnp.where(proposed.found, room, jnp.minimum(room, 1))
        num = jnp.minimum(room, block)
        tokens = None if proposed is None else proposed.tokens[:, :num_proposed]
        hidden, cache, read = _decode_once(
            *(model, before, rows, num, carry.cache, None, attention_plan, config, where),
            tokens,
        )
        logits = model.logits(hidden).reshape(num_rows, block, -1)

        def choose(
            place: Int32[Array, ""], state: tuple[SlotState, Outputs, Bool[Array, " rows"]]
        ) -> tuple[SlotState, Outputs, Bool[Array, " rows"]]:
            now, outputs, counts = state
            sampled = sample(
                *(logits[:, place], rows.sampling, now.tokens, rows.part(now.length)),
                slot=rows.index,
                variant=variant,
                first=counted_from(rows.encoded, config.page_size),
            )
            now = slot_edits.append(now, rows.index, counts, sampled.token, sampled.finite)
            outputs = record(outputs, counts, sampled)
            if proposed is not None:
                tried = counts & (place < proposed.tokens.shape[1])
                hits = tried & proposed.found & (sampled.token == proposed.tokens[:, place])
                outputs = count(outputs, ProposalCount.HITS, hits)
                outputs = count(outputs, ProposalCount.MISSES, tried & ~hits)
                accepted = hits & (place + 1 < num)
                outputs = count(outputs, ProposalCount.ACCEPTED, accepted)
                counts = accepted & rows.live(now.done)
            return now, outputs, counts

        if proposed is not None:
            outputs = count(outputs, ProposalCount.COMPUTED, jnp.maximum(num - 1, 0))
            outputs = count(outputs, ProposalCount.ITERATIONS, num > 0)
        state = before, outputs, num > 0
        if block == 1:
            now, outputs, _ = choose(jnp.int32(0), state)
        else:
            now, outputs, _ = lax.fori_loop(0, block, choose, state)
            if read is not None:
                num_new = rows.part(now.length) - rows.part(before.length)
                newest = jnp.maximum(num_new, 1) - 1
                read = read.reshape(num_rows, block, -1)[index, newest]
        return _Carry(carry.iteration + 1, cache, now.tokens, now.length, now.done, outputs, read)

    nothing = no_outputs(
        *(num_rows, config.max_decode_iterations * block, variant),
        counts_proposals=config.num_proposed > 0,
    )
    unread = None if probe is None else jnp.zeros((num_rows, probe.width))
    start = _Carry(jnp.int32(0), cache, slots.tokens, slots.length, slots.done, nothing, unread)
    end = lax.while_loop(goes_on, iterate, start)
    slots = replace(slots, tokens=end.tokens, length=end.length, done=end.done)
    return end.cache, slots, with_reading(end.outputs, end.tapped, probe, probe_params)


class _Carry(NamedTuple):
    """What goes from one iteration of a decode loop to the next.

    Tokens are those of all slots, to which an iteration appends in place; a window's own would be a
    copy as wide as the context.
    """

    iteration: Int32[Array, ""]
    cache: KVCache
    tokens: Int32[Array, "slots max_context"]
    length: Int32[Array, " slots"]
    done: Bool[Array, " slots"]
    outputs: Outputs
    tapped: Float32[Array, "rows embed"] | None


class _Rows(NamedTuple):
    """What an iteration reads of a window's slots and does not change."""

    window: DecodeWindow
    page_table: Int32[Array, "rows row_pages"]
    sampling: SlotSampling
    encoded: Int32[Array, " rows"] | None
    adapter: Int32[Array, " rows"] | None

    @property
    def index(self) -> Int32[Array, " rows"]:
        """The slot of each row."""
        return self.window.start + jnp.arange(self.window.most.shape[0])

    def part(self, leaf: Shaped[Array, " slots *entry"]) -> Shaped[Array, " rows *entry"]:
        """Return the window's part of an array of all slots."""
        return lax.dynamic_slice_in_dim(leaf, self.window.start, self.window.most.shape[0])

    def live(self, done: Bool[Array, " slots"]) -> Bool[Array, " rows"]:
        """Return which rows take part and have not ended."""
        return (self.window.most > 0) & ~self.part(done)


def stage_decode(
    params: Params,
    cache: KVCache,
    slots: SlotState,
    window: DecodeWindow,
    attention_plan: Plan | None,
    inputs: Float[Array, "rows embed"] | None,
    *,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
) -> tuple[KVCache, Float[Array, "rows hidden"]]:
    """Compute a stage's part of one decode iteration.

    Args:
      inputs: what the stage before this one returned; None for the first stage.

    Returns:
      The cache, and the residual stream; of the last stage, hidden states.
    """
    model = nnx.merge(graphdef, params)
    rows = _rows_of(slots, window)
    num = rows.live(slots.done).astype(jnp.int32)
    hidden, cache, _ = _decode_once(
        model, slots, rows, num, cache, inputs, attention_plan, config, None
    )
    return cache, hidden


def stage_append(
    slots: SlotState,
    index: Int32[Array, " rows"],
    token: Int32[Array, " rows"],
    finite: Bool[Array, " rows"],
) -> SlotState:
    """Do to the slots what `stage_head` did, on a stage that did not sample."""
    num_slots = slots.done.shape[0]
    live = (index < num_slots) & ~slots.done[jnp.minimum(index, num_slots - 1)]
    return slot_edits.append(slots, index, live, token, finite)


def _rows_of(slots: SlotState, window: DecodeWindow) -> _Rows:
    start, size = window.start, window.most.shape[0]
    read = slots.page_table, slots.sampling, slots.encoded, slots.adapter
    return _Rows(
        window, *jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, size), read)
    )


@final
@dataclass(frozen=True)
class _Proposed:
    """Tokens that may come next in each row, where some were `found`."""

    tokens: Int32[Array, "rows num"]
    found: Bool[Array, " rows"]


def _proposed(slots: SlotState, rows: _Rows, config: EngineConfig, num: int) -> _Proposed | None:
    """Return at least one proposal a row; None in a runtime that does not speculate."""
    if not config.num_proposed:
        return None
    return _Proposed(*look_up(rows.part(slots.tokens), rows.part(slots.length), max(1, num)))


def _decode_once(
    model: Any,
    slots: SlotState,
    window: _Rows,
    num: Int32[Array, " rows"],
    cache: KVCache,
    inputs: Float[Array, "rows embed"] | None,
    attention_plan: Plan | None,
    config: EngineConfig,
    where: Tap | None,
    proposed: Int32[Array, "rows proposed"] | None = None,
) -> tuple[Float[Array, "tokens hidden"], KVCache, Float32[Array, "tokens embed"] | None]:
    """Compute each slot's newest token, and what is proposed behind it, row after row.

    Args:
      num: tokens of each row to compute, of 1 and those proposed; 0 for an inert slot.

    Returns:
      Hidden states, the cache, and what is tapped.
    """
    row = jnp.arange(num.shape[0])
    block = 1 if proposed is None else 1 + proposed.shape[1]
    place = jnp.arange(block)
    newest = window.part(slots.length) - 1
    # [rows, block]
    positions = jnp.minimum(newest[:, None] + place, config.max_context - 1)
    token_pages = window.page_table[row[:, None], positions // config.page_size]
    rows, cross_rows = visible_rows(
        config,
        window.encoded,
        query_start=row * block,
        query_length=num,
        first_position=jnp.where(num > 0, newest, 0),
        page_table=window.page_table,
    )
    attention = attention_batch(
        config,
        positions=positions.reshape(-1),
        token_pages=token_pages.reshape(-1),
        valid=(place < num[:, None]).reshape(-1),
        rows=rows,
        plan=attention_plan,
        max_query_length=1 if block == 1 else None,
        cross_rows=cross_rows,
        slot=window.index,
        adapter=None if window.adapter is None else jnp.repeat(window.adapter, block),
    )
    if inputs is None:
        tokens = slots.tokens[window.index, newest][:, None]
        inputs = (tokens if proposed is None else jnp.hstack([tokens, proposed])).reshape(-1)
    return tapped(model, inputs, attention, cache, where)
