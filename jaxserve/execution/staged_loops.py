"""Decode loops over the stages of a model, in micro-batches that pass through them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import final

import numpy as np

from jaxserve.execution.device_stage import DeviceStage
from jaxserve.execution.handle import DeviceHandle
from jaxserve.execution.micro_batches import Pass
from jaxserve.scheduling.plan import Row, StepPlan
from jaxserve.steps.batches import DecodeWindow
from jaxserve.steps.outputs import Outputs
from jaxserve.steps.packing import decode_window, pack_window
from jaxserve.steps.proposals import Draft
from jaxserve.steps.sampling.variants import SamplingNeeds, Variant
from jaxserve.steps.stages import Proposed


@final
@dataclass
class WindowPass:
    """The part of a loop that passes through the stages as one: some of its slots.

    Attributes:
      index: int32 [R], the window's slots; the number of slots for one without a row.
      packed: the window and the rows as arrays.
      outputs: of the loop so far.
      proposals: for the next iteration; None in a loop that does not speculate.
    """

    window: range
    rows: Sequence[Row]
    index: np.ndarray
    packed: DecodeWindow
    outputs: Outputs
    proposals: tuple[Draft, Proposed] | None

    @property
    def num_tokens(self) -> int:
        """Tokens that an iteration computes, with padding."""
        num_proposed = 0 if self.proposals is None else self.proposals[1].tokens.shape[1]
        return len(self.window) + num_proposed

    @classmethod
    def of(
        cls,
        last: DeviceStage,
        window: range,
        rows: Sequence[Row],
        variant: Variant,
        *,
        speculates: bool,
    ) -> WindowPass:
        """Return a window before the first iteration; the last stage proposes if it speculates."""
        config = last.programs.config
        num_proposed = config.num_proposed_beside(len(window)) if speculates else 0
        most = config.max_decode_iterations * (1 + num_proposed)
        outputs = last.no_outputs(len(window), most, variant, num_proposed)
        packed = pack_window(window, rows)
        index = np.where(packed.most, window, config.max_slots).astype(np.int32)
        proposals = last.propose(packed, outputs.num_tokens, num_proposed) if num_proposed else None
        return cls(window, rows, index, packed, outputs, proposals)

    def iterate(self, stages: Sequence[DeviceStage], iteration: int, variant: Variant) -> None:
        """Submit one iteration to all stages, and send what the last one chooses to the others.

        Args:
          iteration: number of iterations before it.
        """
        *others, last = stages
        proposed = None if self.proposals is None else self.proposals[1]
        hidden = None
        for stage in stages:
            hidden = stage.decode(self.rows, self.window, hidden, iteration, proposed)
        assert hidden is not None, "a model without stages"
        if self.proposals is None:
            self.outputs, chosen = last.sample(hidden, self.index, self.outputs, variant)
        else:
            self.outputs, chosen, self.proposals = last.choose(
                self.packed, hidden, self.outputs, self.proposals, variant
            )
        for stage in others:
            stage.send(self.index, chosen)


def run_loop(
    stages: Sequence[DeviceStage],
    plan: StepPlan,
    needs: SamplingNeeds,
    micro_batches: int,
    tell: Callable[[Pass], None],
) -> DeviceHandle:
    """Submit a decode loop; every iteration that its plan has.

    Args:
      micro_batches: maximum number of micro-batches; a power of two.
      tell: called with each pass of a micro-batch.
    """
    variant, last = needs.variant, stages[-1]
    whole, num_proposed = decode_window(last.programs.config, plan, variant)
    size = micro_batch_size(len(whole), micro_batches)
    passes: list[WindowPass] = []
    # Micro-batches without rows are left out, unless there is no row at all, as in measurements.
    batches = {(row.slot - whole.start) // size for row in plan.rows}
    for batch in sorted(batches or range(len(whole) // size)):
        window = whole[batch * size : (batch + 1) * size]
        rows = [row for row in plan.rows if row.slot in window]
        speculates = num_proposed > 0
        passes.append(WindowPass.of(last, window, rows, variant, speculates=speculates))
    for iteration in range(plan.num_iterations):
        for each in passes:
            tell(Pass(frozenset(each.window), each.num_tokens, samples=True))
            each.iterate(stages, iteration, variant)
    slots = [slot for each in passes for slot in each.window]
    place = {slot: i for i, slot in enumerate(slots)}
    output_rows = np.array([place[row.slot] for row in plan.rows], np.int32)
    outputs = [each.outputs for each in passes]
    return DeviceHandle(plan, needs, outputs[-1].tokens, outputs, output_rows)


def micro_batch_size(num_slots: int, micro_batches: int) -> int:
    """Return the number of slots of a micro-batch of a window with `num_slots` slots."""
    return num_slots // gcd(num_slots, micro_batches)
