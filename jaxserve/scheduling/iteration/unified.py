"""Prefill chunks and decode tokens in one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.scheduling.iteration.decode_loop import decode_iterations
from jaxserve.scheduling.policy import StepBuilder
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class Unified:
    """Every running answer advances by one token; what is left of the step goes to prompts.

    Pensieve's unified batch (section 3.4.2 of the thesis) with chunked prefill. `chunk_tokens`
    bounds the prompt tokens of one step, 0 for all that fit; without prompts to compute, the
    step is a decode loop.
    """

    num_device_groups: ClassVar[int] = 1
    makes_way: ClassVar[bool] = False

    chunk_tokens: int = 0

    def new_state(self) -> None:
        return None

    def select(self, step: StepBuilder, state: None) -> None:
        if not step.prefilling and step.first_admissible() is None:
            step.add_decode_loop(decode_iterations(step))
            return
        step.add_decoding()
        budget = min(step.num_tokens_left, self.chunk_tokens or step.num_tokens_left)
        for sequence in step.prefilling:
            budget -= self._add_chunk(step, sequence, budget)
        while budget and (sequence := step.admit()):
            budget -= self._add_chunk(step, sequence, budget)

    def _add_chunk(self, step: StepBuilder, sequence: Sequence, budget: int) -> int:
        count = min(sequence.num_uncomputed, budget)
        return count if count and step.add_row(sequence, count) else 0
