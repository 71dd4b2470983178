"""Request-level schedules: static batches, and one instance of the model a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, final

from jaxserve.scheduling.policy import MAX_ADMITTED, StepBuilder


@final
@dataclass
class StaticBatch:
    """The running batch; `is_open` says whether more sequences may be admitted."""

    num_rows: int = 0
    is_open: bool = False


@final
@dataclass(frozen=True)
class Static:
    """A batch of as many requests as fit, computed until its last answer has ended.

    Dynamic batching as in FasterTransformer and NVIDIA Triton (described in section III of the
    Flover paper): a batch starts when none runs and as many requests wait as there are slots, or
    the first of them has waited for `window_s`. Answers are returned when they end, but their rows
    are still computed, without use, until the whole batch has ended. A batch of more than
    `MAX_ADMITTED` begins over several steps.
    """

    num_device_groups: ClassVar[int] = 1
    makes_way = False
    reserved_slots = 0

    window_s: float = 0.0

    def new_state(self) -> StaticBatch:
        return StaticBatch()

    def select(self, step: StepBuilder, state: StaticBatch) -> None:
        if not step.running:
            state.num_rows, state.is_open = 0, self._starts(step)
        if state.is_open:
            num_admitted = 0
            while step.admit():
                num_admitted += 1
            state.num_rows += num_admitted
            state.is_open = num_admitted == MAX_ADMITTED
        for sequence in step.prefilling:
            if step.num_tokens_left == 0:
                return
            step.add_row(sequence, min(sequence.num_uncomputed, step.num_tokens_left))
        if step.num_tokens_left == step.config.max_step_tokens:
            step.add_decode_loop(
                step.config.max_decode_iterations, compacts=False, min_rows=state.num_rows
            )

    def _starts(self, step: StepBuilder) -> bool:
        """Return whether a batch starts; False to wait for more requests or the window's end."""
        waiting = step.waiting
        if not waiting:
            return False
        if len(waiting) < step.config.max_slots:
            due_s = min(sequence.request.arrival_s for sequence in waiting) + self.window_s
            if step.now_s < due_s:
                step.wait_until(due_s)
                return False
        return True


@final
@dataclass
class Turns:
    """The number of each running sequence's last turn, by its key.

    Without a turn since its admission, it is that of the last turn before.
    """

    num_turns: int = 0
    last: dict[int, int] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Concurrent:
    """Concurrent model instances (section III of the Flover paper): one batch per request.

    Every request starts at once. Instances take turns on the device, the one that has waited
    longest first; each turn reads all weights for one sequence.
    """

    num_device_groups: ClassVar[int] = 1
    makes_way = False
    reserved_slots = 0

    def new_state(self) -> Turns:
        return Turns()

    def select(self, step: StepBuilder, state: Turns) -> None:
        # A sequence without a turn here was admitted by the previous shape.
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
