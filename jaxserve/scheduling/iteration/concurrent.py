"""One instance of the model a request, all of them sharing the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.scheduling.policy import StepBuilder
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class Concurrent:
    """Concurrent model instances (section III of the Flover paper): a batch of one a request.

    Every request starts at once. Instances take turns on the device, the one that has waited
    longest first; each turn reads all weights for one sequence.
    """

    keeps_finished_rows: ClassVar[bool] = False

    def select(self, step: StepBuilder) -> None:
        while step.admit():
            pass
        for turn in sorted(step.running, key=_last_turn):
            if turn.num_uncomputed > 1:
                advances = step.add_row(turn, min(turn.num_uncomputed, step.num_tokens_left))
            else:
                advances = step.add_decode_loop_of(turn, step.config.max_decode_iterations)
            if advances:
                return


def _last_turn(sequence: Sequence) -> int:
    return sequence.last_step
