"""The tokens that the rows of a mixed step choose, on one device or mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.core.config import bucket
from jaxserve.scheduling.plan import StepPlan
from jaxserve.steps.batches import ChoosingRows
from jaxserve.steps.outputs import Outputs
from jaxserve.steps.packing import (
    head_sizes,
    in_places,
    no_masks,
    pack_choosing,
    pack_masks,
    sampling_slots,
)
from jaxserve.steps.programs import Programs
from jaxserve.steps.sampling.variants import Variant
from jaxserve.steps.slots import SlotState


def sampled(
    programs: Programs,
    params: Any,
    slots: SlotState,
    plan: StepPlan,
    sampling: Sequence[int],
    found: Sequence[Any],
    variant: Variant,
) -> tuple[SlotState, Outputs]:
    """Have rows of a plan choose a token each; return the slots with them, and what was chosen.

    Args:
      sampling: the plan's rows that sample, which come first in the batch.
      found: what the body returned of the batch's rows: hidden states, and what is tapped.
    """
    has_masks = plan.masks is not None
    rows = [plan.rows[i] for i in sampling]
    index = sampling_slots(programs.config, rows, variant, has_masks=has_masks)
    # The device computes the body while the masks are still being computed.
    masks = pack_masks(plan, sampling, len(index))
    return programs.mixed_head(
        *(params, slots, found[0], index, found[1], programs.probe_params),
        *(() if masks is None else (masks,)),
        variant=variant,
    )


def verified(
    programs: Programs,
    params: Any,
    slots: SlotState,
    plan: StepPlan,
    sampling: Sequence[int],
    found: Sequence[Any],
    variant: Variant,
) -> tuple[SlotState, Outputs]:
    """`sampled` where some of the rows have proposals, and so may choose several tokens."""
    choosing, masks = verifying_arguments(programs, plan, sampling, variant, has_masks=True)
    return programs.verifying_head(
        *(params, slots, found[0], choosing, found[1], programs.probe_params, masks),
        variant=variant,
    )


def verifying_arguments(
    programs: Programs,
    plan: StepPlan,
    sampling: Sequence[int],
    variant: Variant,
    *,
    has_masks: bool,
) -> tuple[ChoosingRows, Any]:
    """Return the rows of a head that verifies, and its masks; waits until these are computed.

    Args:
      sampling: see `sampled`.
      has_masks: whether the head has the sizes of steps with masks, see `head_sizes`.
    """
    config = programs.config
    order = [i for i in sampling for _ in in_places(plan.rows[i])]
    num_rows = bucket(len(order), head_sizes(config, variant, has_masks=has_masks))
    masks = pack_masks(plan, order, num_rows)
    if masks is None:
        masks = no_masks(num_rows, programs.model_config.vocab_size)
    return pack_choosing(config, [plan.rows[i] for i in sampling], num_rows), masks
