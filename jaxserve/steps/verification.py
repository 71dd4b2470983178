"""The sampling head of a mixed step in which the host has proposed tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxserve.core.config import EngineConfig
from jaxserve.steps import slots as slot_edits
from jaxserve.steps.batches import ChoosingRows, Params
from jaxserve.steps.encoding import counted_from
from jaxserve.steps.merged import merged
from jaxserve.steps.outputs import Outputs, no_outputs, record, with_reading
from jaxserve.steps.probing import Probe
from jaxserve.steps.sampling.sampler import StepArrays, sample
from jaxserve.steps.sampling.variants import Variant
from jaxserve.steps.slots import SlotState


def verifying_head(
    params: Params,
    slots: SlotState,
    row_hidden: Float[Array, "slots hidden"],
    rows: ChoosingRows,
    tapped: Float32[Array, "slots embed"] | None,
    probe_params: Params,
    step_arrays: StepArrays,
    *,
    variant: Variant,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
    probe: Probe | None,
) -> tuple[SlotState, Outputs]:
    """Choose the next tokens of slots whose newest tokens are proposals, as far as these are right.

    The token before each proposal is chosen as any other: only one that equals the proposal counts
    on. So the tokens are those of a step for each.

    Args:
      rows: as many as rows of the step are sampled from, with padding.
      step_arrays: of the step's rows.
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
            *(logits[at], sampling, now.tokens, length),
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
    return end.slots, with_reading(end.outputs, tapped, probe, probe_params)


class _Choice(NamedTuple):
    """The tokens of a step, as far as they have been chosen.

    Attributes:
      place: behind the newest token of each slot that is not proposed.
      goes_on: rows in which the token at this place counts.
    """

    place: Int32[Array, ""]
    slots: SlotState
    outputs: Outputs
    goes_on: Bool[Array, " rows"]
