"""One instance of the model a request, all of them sharing the weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, final

from jaxserve.scheduling.policy import StepBuilder


@final
@dataclass
class Turns:
    """Whose turn it was.

    Attributes:
      num_turns: turns so far.
      last: by the key of each running sequence, the number of its last turn; of one that had none
        since its admission, that of the last turn before.
    """

    num_turns: int = 0
    last: dict[int, int] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Concurrent:
    """Concurrent model instances (section III of the Flover paper): a batch of one a request.

    Every request starts at once. Instances take turns on the device, the one that has waited
    longest first; each turn reads all weights for one sequence.
    """

    num_device_groups: ClassVar[int] = 1
    makes_way = False
    reserved_slots = 0

    def new_state(self) -> Turns:
        return Turns()

    def select(self, step: StepBuilder, state: Turns) -> None:
        # A sequence without a turn here was admitted by the shape before this one.
        last = {each.key: state.last.get(each.key, -1) for each in step.running}
        while admitted := step.admit():
            last[admitted.key] = state.num_turns - 1
        state.last = last
        for sequence in sorted(step.running, key=lambda each: last[each.key]):
            if not sequence.is_decoding:
                count = min(sequence.num_uncomputed, step.num_tokens_left)
                advances = step.add_row(sequence, count)
            else:
                advances = step.add_decode_loop_of(sequence, step.config.max_decode_iterations)
            if advances:
                last[sequence.key] = state.num_turns
                state.num_turns += 1
                return
