"""The steps themselves: pure functions of parameters, cache, slots and a few arrays.

Whole ones run the model from tokens to tokens; those of a stage run a part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.core.config import EngineConfig
from jaxserve.core.sampling_params import MAX_LOGPROBS
from jaxserve.memory.page_pool import NULL_PAGE
from jaxserve.models.attention import causal_rows
from jaxserve.models.batch import AttentionBatch, KVCache
from jaxserve.models.coming import ComingPages
from jaxserve.models.decoder import Tap
from jaxserve.steps import slots as slot_edits
from jaxserve.steps.probing import Probe
from jaxserve.steps.sampling.prompt_logprobs import prompt_logprobs
from jaxserve.steps.sampling.sampler import Sampled, SamplingNeeds, sample
from jaxserve.steps.slots import SlotState
from pallas_kernels import Rows
from pallas_kernels.paged_attention import Plan

Params = Any


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixedBatch:
    """Rows of a mixed step; unused rows have length 0.

    Attributes:
      token_row: int32 [T], row of each token; S for padding.
      slot, start, query_start, query_length: int32 [S].
    """

    token_row: jax.Array
    slot: jax.Array
    start: jax.Array
    query_start: jax.Array
    query_length: jax.Array


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outputs:
    """What a step delivers, for R rows and N iterations.

    tokens i32 [R, N], num_tokens i32 [R], finite bool [R], logprobs f32 [R, N],
    top_ids i32 and top_logprobs f32 [R, N, MAX_LOGPROBS]. With a probe, remaining f32 [R, buckets]:
    its logits where a row's last token was sampled.
    """

    tokens: jax.Array
    num_tokens: jax.Array
    finite: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    remaining: jax.Array | None = None


def mixed_body(
    params: Params,
    cache: KVCache,
    slots: SlotState,
    batch: MixedBatch,
    attention_plan: Plan | None,
    inputs: jax.Array | None = None,  # [T, E], where a stage before this one ended
    coming: ComingPages | None = None,
    *,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
    probe: Probe | None,
) -> tuple[KVCache, jax.Array, jax.Array, jax.Array | None]:
    """Compute every row. Returns the cache, hidden states [T, E], and those of row ends [S, E].

    And of row ends what the probe reads [S, E]. Pages that are `coming` are in the cache then.
    """
    model = nnx.merge(graphdef, params)
    positions, slot = _positions(batch)
    valid = (batch.token_row < config.max_slots) & ~slots.done[slot]
    live = ~slots.done[batch.slot]
    attention = _attention_batch(
        config,
        positions=positions,
        token_pages=slots.page_table[slot, positions // config.page_size],
        valid=valid,
        rows=causal_rows(
            query_start=batch.query_start,
            query_length=jnp.where(live, batch.query_length, 0),
            first_position=batch.start,
            page_table=slots.page_table[batch.slot],
        ),
        plan=attention_plan,
    )
    inputs = slots.tokens[slot, positions] if inputs is None else inputs
    ends = batch.query_start + jnp.maximum(batch.query_length, 1) - 1
    tap = _tap(probe, ends)
    hidden, cache, tapped = _tapped(model, inputs, attention, cache, tap, coming)
    return cache, hidden, hidden[ends], tapped


def mixed_head(
    params: Params,
    slots: SlotState,
    row_hidden: jax.Array,  # [S, E]
    index: jax.Array,  # int32 [R], slots of the first R rows; S to skip
    needs: SamplingNeeds,
    tapped: jax.Array | None,  # [S, E]
    probe_params: Params,
    *,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
    probe: Probe | None,
) -> tuple[SlotState, Outputs]:
    """Sample the next token of the rows and append it to their slots."""
    outputs = no_outputs(index.shape[0], 1)
    slots, outputs, _, _ = stage_head(
        params, slots, row_hidden, index, outputs, jnp.int32(0), needs, graphdef=graphdef
    )
    if tapped is not None:
        tapped = tapped[: index.shape[0]]
    return slots, _with_reading(outputs, tapped, probe, probe_params)


def decode_loop(
    params: Params,
    cache: KVCache,
    slots: SlotState,
    window_start: jax.Array,  # int32 scalar
    num_iterations: jax.Array,  # int32 scalar
    needs: SamplingNeeds,
    attention_plan: Plan | None,
    probe_params: Params,
    *,
    num_rows: int,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
    probe: Probe | None,
) -> tuple[KVCache, SlotState, Outputs]:
    """Decode the slots of a window up to `num_iterations` times, less when all of them end."""
    model = nnx.merge(graphdef, params)
    window = _window(slots, window_start, num_rows)
    index = jnp.arange(num_rows)
    tap = _tap(probe, index)

    def goes_on(carry: _Carry) -> jax.Array:
        return (carry.iteration < num_iterations) & ~carry.window.done.all()

    def iterate(carry: _Carry) -> _Carry:
        iteration, window = carry.iteration, carry.window
        live = ~window.done
        hidden, cache, tapped = _decode_once(
            model, window, carry.cache, None, attention_plan, config, tap
        )
        sampled = sample(model.logits(hidden), window.sampling, window.tokens, window.length, needs)
        window = slot_edits.append(window, index, live, sampled.token, sampled.finite)
        outputs = _record(carry.outputs, iteration, live, sampled)
        return _Carry(iteration + 1, cache, window, outputs, tapped)

    nothing = no_outputs(num_rows, config.max_decode_iterations)
    untapped = None if probe is None else jnp.zeros((num_rows, probe.width))
    start = _Carry(jnp.int32(0), cache, window, nothing, untapped)
    end = lax.while_loop(goes_on, iterate, start)
    slots = jax.tree.map(
        lambda leaf, new: lax.dynamic_update_slice_in_dim(leaf, new, window_start, 0),
        slots,
        end.window,
    )
    return end.cache, slots, _with_reading(end.outputs, end.tapped, probe, probe_params)


class _Carry(NamedTuple):
    """What goes from one iteration of a decode loop to the next."""

    iteration: jax.Array
    cache: KVCache
    window: SlotState
    outputs: Outputs
    tapped: jax.Array | None


def stage_decode(
    params: Params,
    cache: KVCache,
    slots: SlotState,
    window_start: jax.Array,  # int32 scalar
    attention_plan: Plan | None,
    inputs: jax.Array | None,  # [R, E], where the stage before this one ended
    *,
    num_rows: int,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
) -> tuple[KVCache, jax.Array]:
    """A stage's part of one decode iteration of a window. Returns the cache and [R, E]."""
    window = _window(slots, window_start, num_rows)
    model = nnx.merge(graphdef, params)
    hidden, cache, _ = _decode_once(model, window, cache, inputs, attention_plan, config, None)
    return cache, hidden


def stage_head(
    params: Params,
    slots: SlotState,
    hidden: jax.Array,  # [>= R, E]
    index: jax.Array,  # int32 [R], slots of the first R; S to skip
    outputs: Outputs,  # of R rows
    iteration: jax.Array,  # int32 scalar
    needs: SamplingNeeds,
    *,
    graphdef: nnx.GraphDef,
) -> tuple[SlotState, Outputs, jax.Array, jax.Array]:
    """Sample the next token of the rows, append it to their slots and record it.

    Also returns the tokens (int32 [R]) and which are finite (bool [R]), for `stage_append`.
    """
    model = nnx.merge(graphdef, params)
    num_slots = slots.done.shape[0]
    slot = jnp.minimum(index, num_slots - 1)
    live = (index < num_slots) & ~slots.done[slot]
    sampled = sample(
        model.logits(hidden[: index.shape[0]]),
        jax.tree.map(lambda leaf: leaf[slot], slots.sampling),
        slots.tokens[slot],
        slots.length[slot],
        needs,
    )
    slots = slot_edits.append(slots, index, live, sampled.token, sampled.finite)
    return slots, _record(outputs, iteration, live, sampled), sampled.token, sampled.finite


def stage_append(
    slots: SlotState, index: jax.Array, token: jax.Array, finite: jax.Array
) -> SlotState:
    """What `stage_head` did to the slots, on a stage that did not sample."""
    num_slots = slots.done.shape[0]
    live = (index < num_slots) & ~slots.done[jnp.minimum(index, num_slots - 1)]
    return slot_edits.append(slots, index, live, token, finite)


def score_prompts(
    params: Params,
    slots: SlotState,
    hidden: jax.Array,  # [T, E]
    batch: MixedBatch,
    *,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each token's successor in its slot: log-probability, and the likeliest ones'."""
    model = nnx.merge(graphdef, params)
    positions, slot = _positions(batch)
    successors = jnp.minimum(positions + 1, config.max_context - 1)
    return prompt_logprobs(model.logits, hidden, slots.tokens[slot, successors])


def _window(slots: SlotState, start: jax.Array, size: int) -> SlotState:
    return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, size), slots)


def _decode_once(
    model: Any,
    window: SlotState,
    cache: KVCache,
    inputs: jax.Array | None,
    attention_plan: Plan | None,
    config: EngineConfig,
    tap: Tap | None,
) -> tuple[jax.Array, KVCache, jax.Array | None]:
    """Hidden states [R, E] of each slot's newest token, the cache with its KV, what is tapped."""
    index = jnp.arange(window.done.shape[0])
    live = ~window.done
    positions = window.length - 1
    attention = _attention_batch(
        config,
        positions=positions,
        token_pages=window.page_table[index, positions // config.page_size],
        valid=live,
        rows=causal_rows(
            query_start=index,
            query_length=live.astype(jnp.int32),
            first_position=positions,
            page_table=window.page_table,
        ),
        plan=attention_plan,
        max_query_length=1,
    )
    inputs = window.tokens[index, positions] if inputs is None else inputs
    return _tapped(model, inputs, attention, cache, tap)


def _tapped(
    model: Any,
    inputs: jax.Array,
    attention: AttentionBatch,
    cache: KVCache,
    tap: Tap | None,
    coming: ComingPages | None = None,
) -> tuple[jax.Array, KVCache, jax.Array | None]:
    """As `Decoder.tapped`, what is tapped in float32."""
    hidden, cache, tapped = model.tapped(inputs, attention, cache, tap, coming)
    return hidden, cache, None if tapped is None else tapped.astype(jnp.float32)


def _tap(probe: Probe | None, rows: jax.Array) -> Tap | None:
    return None if probe is None else Tap(probe.layer, rows)


def _with_reading(
    outputs: Outputs, tapped: jax.Array | None, probe: Probe | None, probe_params: Params
) -> Outputs:
    """The outputs, and what the probe reads of the activations [R, E] of their rows."""
    if probe is None or tapped is None:
        return outputs
    return replace(outputs, remaining=probe.apply(probe_params, tapped).astype(jnp.float32))


def _positions(batch: MixedBatch) -> tuple[jax.Array, jax.Array]:
    """Position and slot of every token, int32 [T]; padding has those of row 0's start."""
    is_padding = batch.token_row >= batch.slot.shape[0]
    row = jnp.where(is_padding, 0, batch.token_row)
    offset = jnp.arange(batch.token_row.shape[0]) - batch.query_start[row]
    return batch.start[row] + jnp.where(is_padding, 0, offset), batch.slot[row]


def _attention_batch(
    config: EngineConfig,
    *,
    positions: jax.Array,
    token_pages: jax.Array,
    valid: jax.Array,
    rows: Rows,
    plan: Plan | None,
    max_query_length: int | None = None,
) -> AttentionBatch:
    return AttentionBatch(
        positions=positions,
        page=jnp.where(valid, token_pages, NULL_PAGE),
        offset=positions % config.page_size,
        rows=rows,
        plan=plan,
        max_query_length=max_query_length,
        implementation=config.attention,
    )


def no_outputs(num_rows: int, num_iterations: int) -> Outputs:
    shape = (num_rows, num_iterations)
    return Outputs(
        tokens=jnp.zeros(shape, jnp.int32),
        num_tokens=jnp.zeros(num_rows, jnp.int32),
        finite=jnp.ones(num_rows, jnp.bool_),
        logprobs=jnp.zeros(shape, jnp.float32),
        top_ids=jnp.zeros((*shape, MAX_LOGPROBS), jnp.int32),
        top_logprobs=jnp.zeros((*shape, MAX_LOGPROBS), jnp.float32),
    )


def _record(out: Outputs, iteration: jax.Array, live: jax.Array, sampled: Sampled) -> Outputs:
    """Outputs with this iteration's tokens; a slot's tokens are contiguous from the first on."""
    return replace(
        out,
        tokens=out.tokens.at[:, iteration].set(sampled.token),
        num_tokens=out.num_tokens + (live & sampled.finite),
        finite=out.finite & (sampled.finite | ~live),
        logprobs=out.logprobs.at[:, iteration].set(sampled.logprob),
        top_ids=out.top_ids.at[:, iteration].set(sampled.top_ids),
        top_logprobs=out.top_logprobs.at[:, iteration].set(sampled.top_logprobs),
    )
