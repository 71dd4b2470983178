"""Request-level batches: what starts together runs to the end of its longest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.scheduling.policy import MAX_ADMITTED, StepBuilder


@final
@dataclass
class Batch:
    """The batch that runs.

    Attributes:
      num_rows: sequences that were admitted into it.
      is_open: whether more may be admitted.
    """

    num_rows: int = 0
    is_open: bool = False


@final
@dataclass(frozen=True)
class Static:
    """A batch of as many requests as fit, computed until its last answer has ended.

    Dynamic batching as in FasterTransformer and NVIDIA Triton (described in section III of the
    Flover paper): a batch starts when none runs and as many requests wait as there are slots, or
    the first of them has waited for `window_s`. Answers are returned when they end, but their rows
    are computed on, without use, until the whole batch has ended. A batch of more than
    `MAX_ADMITTED` begins over several steps.
    """

    num_device_groups: ClassVar[int] = 1
    makes_way = False
    reserved_slots = 0

    window_s: float = 0.0

    def new_state(self) -> Batch:
        return Batch()

    def select(self, step: StepBuilder, state: Batch) -> None:
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
