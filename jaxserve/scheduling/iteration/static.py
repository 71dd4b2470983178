"""Request-level batches: what starts together runs to the end of its longest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.scheduling.policy import StepBuilder


@final
@dataclass(frozen=True)
class Static:
    """A batch of as many requests as fit, computed until its last answer has ended.

    Dynamic batching as in FasterTransformer and NVIDIA Triton (described in section III of the
    Flover paper): a batch starts when none runs and as many requests wait as there are slots, or
    the first of them has waited for `window_s`. Answers are returned when they end, but their rows
    are computed on, for nobody, until the whole batch has ended.
    """

    window_s: float = 0.0
    keeps_finished_rows: ClassVar[bool] = True

    def select(self, step: StepBuilder) -> None:
        if not step.running and not self._start(step):
            return
        for sequence in step.prefilling:
            if step.num_tokens_left == 0:
                return
            step.add_row(sequence, min(sequence.num_uncomputed, step.num_tokens_left))
        if step.num_tokens_left == step.config.max_step_tokens:
            step.add_decode_loop(step.config.max_decode_iterations)

    def _start(self, step: StepBuilder) -> bool:
        """Take a batch in; False to wait for more requests or for the window's end."""
        waiting = step.waiting
        if not waiting:
            return False
        if len(waiting) < step.config.max_slots:
            due_s = min(sequence.request.arrival_s for sequence in waiting) + self.window_s
            if step.now_s < due_s:
                step.wait_until(due_s)
                return False
        while step.admit():
            pass
        return True
