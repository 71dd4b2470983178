"""The sampling head of a step: hidden states in, the next tokens in their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxserve.core.config import EngineConfig
from jaxserve.kernels.dispatch import only_rows
from jaxserve.steps import slots as slot_edits
from jaxserve.steps.drafting import merged
from jaxserve.steps.encoding import counted_from
from jaxserve.steps.outputs import Outputs, no_outputs, record, with_reading
from jaxserve.steps.packing import ChoosingRows, Params
from jaxserve.steps.probing import Probe
from jaxserve.steps.sampling.processors import PROCESSORS, Processor
from jaxserve.steps.sampling.sampler import StepArrays, Variant, sample
from jaxserve.steps.slots import SlotState


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chosen:
    """The tokens that a head has appended to slots, for stages that did not sample them."""

    tokens: Int32[Array, "rows most"]
    num: Int32[Array, " rows"]  # number of tokens of each row
    ended: Bool[Array, " rows"]  # rows whose slots have ended


def mixed_head(
    params: Params,
    slots: SlotState,
    row_hidden: Float[Array, "slots hidden"],
    index: Int32[Array, " rows"],
    tapped: Float32[Array, "slots embed"] | None,
    probe_params: Params,
    step_arrays: StepArrays | None = None,
    *,
    variant: Variant,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
    probe: Probe | None,
    processors: Sequence[Processor] = PROCESSORS,
) -> tuple[SlotState, Outputs, Chosen]:
    """Sample the next token of a mixed step's first rows and append it to their slots.

    `index` has the rows' slots; the number of slots skips a row.
    """
    slots, outputs, chosen = stage_head(
        params,
        slots,
        row_hidden,
        index,
        no_outputs(index.shape[0], 1, variant),
        step_arrays,
        variant=variant,
        graphdef=graphdef,
        config=config,
        processors=processors,
    )
    if tapped is not None:
        tapped = tapped[: index.shape[0]]
    return slots, with_reading(outputs, tapped, probe, probe_params), chosen


def stage_head(
    params: Params,
    slots: SlotState,
    hidden: Float[Array, "num hidden"],  # of the rows first; more may follow
    index: Int32[Array, " rows"],  # slots of the rows; the number of slots skips one
    outputs: Outputs,
    step_arrays: StepArrays | None = None,
    *,
    variant: Variant,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
    processors: Sequence[Processor] = PROCESSORS,
) -> tuple[SlotState, Outputs, Chosen]:
    """Sample the next token of the rows, append it to their slots and record it.

    Also returns the appended tokens, for `stages.append`.
    """
    model = merged(graphdef, params, config)
    num_slots = slots.done.shape[0]
    slot = jnp.minimum(index, num_slots - 1)
    live = (index < num_slots) & ~slots.done[slot]
    with only_rows(live):
        logits = model.logits(hidden[: index.shape[0]])
    sampled = sample(
        logits,
        jax.tree.map(lambda leaf: leaf[slot], slots.sampling),
        slots.tokens,
        slots.length[slot],
        slot=slot,
        variant=variant,
        step_arrays=step_arrays,
        processors=processors,
        first=None
        if slots.encoded is None
        else counted_from(slots.encoded[slot], config.page_size),
    )
    slots = slot_edits.append(slots, index, live, sampled.token, sampled.finite)
    num = (live & sampled.finite).astype(jnp.int32)
    chosen = Chosen(sampled.token[:, None], num, slots.done[slot])
    return slots, record(outputs, live, sampled), chosen


def verifying_head(
    params: Params,
    slots: SlotState,
    row_hidden: Float[Array, "slots hidden"],
    rows: ChoosingRows,  # one for each sampled row of the step, with padding
    tapped: Float32[Array, "slots embed"] | None,
    probe_params: Params,
    step_arrays: StepArrays,  # of the step's rows
    *,
    variant: Variant,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
    probe: Probe | None,
) -> tuple[SlotState, Outputs, Chosen]:
    """Choose the next tokens of slots whose newest tokens are proposals, up to the first wrong one.

    The token before each proposal is chosen as usual, and the choice after it counts only if it
    equals the proposal. So the tokens are those of one step per token.
    """
    model = merged(graphdef, params, config)
    num_rows, num_slots = rows.slot.shape[0], slots.done.shape[0]
    slot = jnp.minimum(rows.slot, num_slots - 1)
    logits = model.logits(row_hidden[:num_rows])
    sampling = jax.tree.map(lambda leaf: leaf[slot], slots.sampling)
    length = slots.length.at[rows.slot].add(-rows.num_proposed, mode="drop")
    before = replace(slots, length=length)

    def choose(state: _Choice) -> _Choice:
        place, now, outputs, goes_on = state
        at = jnp.minimum(rows.first + place, num_rows - 1)
        length = now.length[slot]
        sampled = sample(
            logits[at],
            sampling,
            now.tokens,
            length,
            slot=slot,
            variant=variant,
            step_arrays=jax.tree.map(lambda leaf: leaf[at], step_arrays),
            first=None
            if slots.encoded is None
            else counted_from(slots.encoded[slot], config.page_size),
        )
        proposed = now.tokens[slot, jnp.minimum(length, config.max_context - 1)]
        now = slot_edits.append(now, rows.slot, goes_on, sampled.token, sampled.finite)
        outputs = record(outputs, goes_on, sampled)
        is_right = (sampled.token == proposed) & (place < rows.num_proposed)
        return _Choice(place + 1, now, outputs, goes_on & is_right & ~now.done[slot])

    live = (rows.slot < num_slots) & ~slots.done[slot]
    nothing = no_outputs(num_rows, 1 + config.num_proposed, variant)
    end = lax.while_loop(
        lambda state: state.goes_on.any(), choose, _Choice(jnp.int32(0), before, nothing, live)
    )
    if tapped is not None:
        last = rows.first + jnp.maximum(end.outputs.num_tokens, 1) - 1
        tapped = tapped[jnp.minimum(last, num_rows - 1)]
    outputs = with_reading(end.outputs, tapped, probe, probe_params)
    chosen = Chosen(outputs.tokens, outputs.num_tokens, end.slots.done[slot])
    return end.slots, outputs, chosen


class _Choice(NamedTuple):
    """The tokens that a step has chosen so far."""

    place: Int32[Array, ""]  # counts from the newest token of each slot that is not proposed
    slots: SlotState
    outputs: Outputs
    goes_on: Bool[Array, " rows"]  # rows in which the token at this place counts
