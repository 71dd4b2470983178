"""The sampling head of a step: hidden states in, the next tokens in their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxserve.core.config import EngineConfig
from jaxserve.steps import slots as slot_edits
from jaxserve.steps.batches import Params
from jaxserve.steps.encoding import counted_from
from jaxserve.steps.merged import merged
from jaxserve.steps.outputs import Outputs, no_outputs, record, with_reading
from jaxserve.steps.probing import Probe
from jaxserve.steps.sampling.processors import PROCESSORS
from jaxserve.steps.sampling.processors.processor import Processor
from jaxserve.steps.sampling.sampler import StepArrays, sample
from jaxserve.steps.sampling.variants import Variant
from jaxserve.steps.slots import SlotState


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chosen:
    """The tokens that the last stage has appended to slots.

    Attributes:
      num: number of tokens of each row.
      ended: rows whose slots have ended.
    """

    tokens: Int32[Array, "rows most"]
    num: Int32[Array, " rows"]
    ended: Bool[Array, " rows"]


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
) -> tuple[SlotState, Outputs]:
    """Sample the next token of the first rows of a mixed step and append it to their slots.

    Args:
      index: slots of these rows; the number of slots to skip one.
    """
    slots, outputs, _ = stage_head(
        *(params, slots, row_hidden, index),
        no_outputs(index.shape[0], 1, variant),
        step_arrays,
        variant=variant,
        graphdef=graphdef,
        config=config,
        processors=processors,
    )
    if tapped is not None:
        tapped = tapped[: index.shape[0]]
    return slots, with_reading(outputs, tapped, probe, probe_params)


def stage_head(
    params: Params,
    slots: SlotState,
    hidden: Float[Array, "num hidden"],
    index: Int32[Array, " rows"],
    outputs: Outputs,
    step_arrays: StepArrays | None = None,
    *,
    variant: Variant,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
    processors: Sequence[Processor] = PROCESSORS,
) -> tuple[SlotState, Outputs, Chosen]:
    """Sample the next token of the rows, append it to their slots and record it.

    Also returns what was appended, for `stages.append`.

    Args:
      hidden: of the rows, and of others after them.
      index: slots of the rows; the number of slots to skip one.
    """
    model = merged(graphdef, params, config)
    num_slots = slots.done.shape[0]
    slot = jnp.minimum(index, num_slots - 1)
    live = (index < num_slots) & ~slots.done[slot]
    sampled = sample(
        model.logits(hidden[: index.shape[0]]),
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
