"""The sampling head of a step: hidden states in, the next tokens in their slots."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.steps import slots as slot_edits
from jaxserve.steps.batches import Params
from jaxserve.steps.outputs import Outputs, no_outputs, record, with_reading
from jaxserve.steps.probing import Probe
from jaxserve.steps.sampling.processors import PROCESSORS
from jaxserve.steps.sampling.processors.processor import Processor
from jaxserve.steps.sampling.sampler import StepArrays, sample
from jaxserve.steps.sampling.variants import Variant
from jaxserve.steps.slots import SlotState


def mixed_head(
    params: Params,
    slots: SlotState,
    row_hidden: jax.Array,  # [S, E]
    index: jax.Array,  # int32 [R], slots of the first R rows; S to skip
    tapped: jax.Array | None,  # [S, E]
    probe_params: Params,
    step_arrays: StepArrays | None = None,  # of the R rows
    *,
    variant: Variant,
    graphdef: nnx.GraphDef,
    probe: Probe | None,
    processors: Sequence[Processor] = PROCESSORS,
) -> tuple[SlotState, Outputs]:
    """Sample the next token of the rows of a mixed step and append it to their slots."""
    slots, outputs, _, _ = stage_head(
        *(params, slots, row_hidden, index),
        no_outputs(index.shape[0], 1, variant),
        jnp.int32(0),
        step_arrays,
        variant=variant,
        graphdef=graphdef,
        processors=processors,
    )
    if tapped is not None:
        tapped = tapped[: index.shape[0]]
    return slots, with_reading(outputs, tapped, probe, probe_params)


def stage_head(
    params: Params,
    slots: SlotState,
    hidden: jax.Array,  # [>= R, E]
    index: jax.Array,  # int32 [R], slots of the first R; S to skip
    outputs: Outputs,  # of R rows
    iteration: jax.Array,  # int32 scalar
    step_arrays: StepArrays | None = None,  # of the R rows
    *,
    variant: Variant,
    graphdef: nnx.GraphDef,
    processors: Sequence[Processor] = PROCESSORS,
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
        variant=variant,
        step_arrays=step_arrays,
        processors=processors,
    )
    slots = slot_edits.append(slots, index, live, sampled.token, sampled.finite)
    return slots, record(outputs, iteration, live, sampled), sampled.token, sampled.finite
