"""Request-level batches: what starts together runs to the end of its longest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.scheduling.policy import StepBuilder


@final
@dataclass
class Batch:
    """The batch that runs; `num_rows` is the number of sequences that it began with."""

    num_rows: int = 0


@final
@dataclass(frozen=True)
class Static:
    """A batch of as many requests as fit, computed until its last answer has ended.

    Dynamic batching as in FasterTransformer and NVIDIA Triton (described in section III of the
    Flover paper): a batch starts when none runs and as many requests wait as there are slots, or
    the first of them has waited for `window_s`. Answers are returned when they end, but their rows
    are computed on, without use, until the whole batch has ended.
    """

    num_device_groups: ClassVar[int] = 1
    makes_way = False

    window_s: float = 0.0

    def new_state(self) -> Batch:
        return Batch()

    def select(self, step: StepBuilder, state: Batch) -> None:
        if not step.running:
            state.num_rows = self._start(step)
        for sequence in step.prefilling:
            if step.num_tokens_left == 0:
                return
            step.add_row(sequence, min(sequence.num_uncomputed, step.num_tokens_left))
        if step.num_tokens_left == step.config.max_step_tokens:
            step.add_decode_loop(
                step.config.max_decode_iterations, compacts=False, min_rows=state.num_rows
            )

    def _start(self, step: StepBuilder) -> int:
        """Admit a batch and return its size; 0 to wait for more requests or the window's end."""
        waiting = step.waiting
        if not waiting:
            return 0
        if len(waiting) < step.config.max_slots:
            due_s = min(sequence.request.arrival_s for sequence in waiting) + self.window_s
            if step.now_s < due_s:
                step.wait_until(due_s)
                return 0
        num_rows = 0
        while step.admit():
            num_rows += 1
        return num_rows
