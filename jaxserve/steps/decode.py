"""Decoding on the device: a loop over a whole model, or one iteration of a stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from jaxserve.core.config import EngineConfig
from jaxserve.models.batch import KVCache
from jaxserve.models.decoder import Tap
from jaxserve.steps import slots as slot_edits
from jaxserve.steps.batches import DecodeWindow, Params, attention_batch, tap, tapped
from jaxserve.steps.encoding import counted_from, visible_rows
from jaxserve.steps.outputs import Outputs, no_outputs, record, with_reading
from jaxserve.steps.probing import Probe
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
    graphdef: nnx.GraphDef,
    config: EngineConfig,
    probe: Probe | None,
) -> tuple[KVCache, SlotState, Outputs]:
    """Decode the slots of a window until its iterations are over or all have ended."""
    model = nnx.merge(graphdef, params)
    num_rows = window.decodes.shape[0]
    where = tap(probe, jnp.arange(num_rows))
    rows = _rows_of(slots, window)

    def goes_on(carry: _Carry) -> Bool[Array, ""]:
        return (carry.iteration < window.num_iterations) & rows.live(carry.done).any()

    def iterate(carry: _Carry) -> _Carry:
        iteration = carry.iteration
        now = replace(slots, tokens=carry.tokens, length=carry.length, done=carry.done)
        live = rows.live(carry.done)
        hidden, cache, read = _decode_once(
            model, now, rows, carry.cache, None, attention_plan, config, where
        )
        sampled = sample(
            *(model.logits(hidden), rows.sampling, now.tokens, rows.part(now.length)),
            slot=rows.index,
            variant=variant,
            first=counted_from(rows.encoded, config.page_size),
        )
        now = slot_edits.append(now, rows.index, live, sampled.token, sampled.finite)
        outputs = record(carry.outputs, iteration, live, sampled)
        return _Carry(iteration + 1, cache, now.tokens, now.length, now.done, outputs, read)

    nothing = no_outputs(num_rows, config.max_decode_iterations, variant)
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

    @property
    def index(self) -> Int32[Array, " rows"]:
        """The slot of each row."""
        return self.window.start + jnp.arange(self.window.decodes.shape[0])

    def part(self, leaf: Shaped[Array, " slots *entry"]) -> Shaped[Array, " rows *entry"]:
        """Return the window's part of an array of all slots."""
        return lax.dynamic_slice_in_dim(leaf, self.window.start, self.window.decodes.shape[0])

    def live(self, done: Bool[Array, " slots"]) -> Bool[Array, " rows"]:
        """Return which rows take part and have not ended."""
        return self.window.decodes & ~self.part(done)


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
    hidden, cache, _ = _decode_once(
        model, slots, _rows_of(slots, window), cache, inputs, attention_plan, config, None
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
    start, size = window.start, window.decodes.shape[0]
    read = slots.page_table, slots.sampling, slots.encoded
    return _Rows(
        window, *jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, size), read)
    )


def _decode_once(
    model: Any,
    slots: SlotState,
    window: _Rows,
    cache: KVCache,
    inputs: Float[Array, "rows embed"] | None,
    attention_plan: Plan | None,
    config: EngineConfig,
    where: Tap | None,
) -> tuple[Float[Array, "rows hidden"], KVCache, Float32[Array, "rows embed"] | None]:
    """Compute each slot's newest token: hidden states, the cache, and what is tapped."""
    live, positions = window.live(slots.done), window.part(slots.length) - 1
    index = jnp.arange(live.shape[0])
    rows, cross_rows = visible_rows(
        config,
        window.encoded,
        query_start=index,
        query_length=live.astype(jnp.int32),
        first_position=jnp.where(live, positions, 0),
        page_table=window.page_table,
    )
    attention = attention_batch(
        config,
        positions=positions,
        token_pages=window.page_table[index, positions // config.page_size],
        valid=live,
        rows=rows,
        plan=attention_plan,
        max_query_length=1,
        cross_rows=cross_rows,
        slot=window.index,
    )
    inputs = slots.tokens[window.index, positions] if inputs is None else inputs
    return tapped(model, inputs, attention, cache, where)
