"""Decoding on the device: a loop over a whole model, or one iteration of a stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxserve.core.config import EngineConfig
from jaxserve.models.batch import KVCache
from jaxserve.models.decoder import Tap
from jaxserve.steps import slots as slot_edits
from jaxserve.steps.batches import Params, attention_batch, tap, tapped
from jaxserve.steps.encoding import counted_from, visible_rows
from jaxserve.steps.outputs import Outputs, no_outputs, record, with_reading
from jaxserve.steps.probing import Probe
from jaxserve.steps.sampling.sampler import sample
from jaxserve.steps.sampling.variants import Variant
from jaxserve.steps.slots import SlotState
from pallas_kernels.paged_attention import Plan


def decode_loop(
    params: Params,
    cache: KVCache,
    slots: SlotState,
    window_start: Int32[Array, ""],
    decodes: Bool[Array, " rows"],
    num_iterations: Int32[Array, ""],
    attention_plan: Plan | None,
    probe_params: Params,
    *,
    variant: Variant,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
    probe: Probe | None,
) -> tuple[KVCache, SlotState, Outputs]:
    """Decode slots from `window_start` on, `num_iterations` times, or fewer when all have ended.

    `decodes` says which slots take part. The others, and inert ones, stay as they are.
    """
    model = nnx.merge(graphdef, params)
    window = _window(slots, window_start, decodes)
    index = jnp.arange(decodes.shape[0])
    where = tap(probe, index)

    def goes_on(carry: _Carry) -> Bool[Array, ""]:
        return (carry.iteration < num_iterations) & ~carry.window.done.all()

    def iterate(carry: _Carry) -> _Carry:
        iteration, window = carry.iteration, carry.window
        live = ~window.done
        hidden, cache, read = _decode_once(
            model, window, window_start, carry.cache, None, attention_plan, config, where
        )
        sampled = sample(
            *(model.logits(hidden), window.sampling, window.tokens, window.length),
            variant=variant,
            first=counted_from(window.encoded, config.page_size),
        )
        window = slot_edits.append(window, index, live, sampled.token, sampled.finite)
        outputs = record(carry.outputs, iteration, live, sampled)
        return _Carry(iteration + 1, cache, window, outputs, read)

    nothing = no_outputs(decodes.shape[0], config.max_decode_iterations, variant)
    unread = None if probe is None else jnp.zeros((decodes.shape[0], probe.width))
    start = _Carry(jnp.int32(0), cache, window, nothing, unread)
    end = lax.while_loop(goes_on, iterate, start)
    before = lax.dynamic_slice_in_dim(slots.done, window_start, decodes.shape[0])
    window = replace(end.window, done=jnp.where(decodes, end.window.done, before))
    slots = jax.tree.map(
        lambda leaf, new: lax.dynamic_update_slice_in_dim(leaf, new, window_start, 0),
        slots,
        window,
    )
    return end.cache, slots, with_reading(end.outputs, end.tapped, probe, probe_params)


class _Carry(NamedTuple):
    """What goes from one iteration of a decode loop to the next."""

    iteration: Int32[Array, ""]
    cache: KVCache
    window: SlotState
    outputs: Outputs
    tapped: Float32[Array, "rows embed"] | None


def stage_decode(
    params: Params,
    cache: KVCache,
    slots: SlotState,
    window_start: Int32[Array, ""],
    decodes: Bool[Array, " rows"],
    attention_plan: Plan | None,
    inputs: Float[Array, "rows embed"] | None,
    *,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
) -> tuple[KVCache, Float[Array, "rows hidden"]]:
    """Compute a stage's part of one decode iteration.

    Args:
      decodes: which slots from `window_start` on take part.
      inputs: what the stage before this one returned; None for the first stage.

    Returns:
      The cache, and the residual stream; of the last stage, hidden states.
    """
    window = _window(slots, window_start, decodes)
    model = nnx.merge(graphdef, params)
    hidden, cache, _ = _decode_once(
        model, window, window_start, cache, inputs, attention_plan, config, None
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


def _window(slots: SlotState, start: Int32[Array, ""], decodes: Bool[Array, " rows"]) -> SlotState:
    """Return the slots from `start` on, inert where they do not take part."""
    size = decodes.shape[0]
    window = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, size), slots)
    return replace(window, done=window.done | ~decodes)


def _decode_once(
    model: Any,
    window: SlotState,
    window_start: Int32[Array, ""],
    cache: KVCache,
    inputs: Float[Array, "rows embed"] | None,
    attention_plan: Plan | None,
    config: EngineConfig,
    where: Tap | None,
) -> tuple[Float[Array, "rows hidden"], KVCache, Float32[Array, "rows embed"] | None]:
    """Compute each slot's newest token: hidden states, the cache, and what is tapped."""
    index = jnp.arange(window.done.shape[0])
    live = ~window.done
    positions = window.length - 1
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
        slot=window_start + index,
    )
    inputs = window.tokens[index, positions] if inputs is None else inputs
    return tapped(model, inputs, attention, cache, where)
