"""Iteration-level scheduling, prefill first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.scheduling.iteration.decode_loop import decode_iterations
from jaxserve.scheduling.policy import StepBuilder


@final
@dataclass
class Admissions:
    """How many sequences were admitted since the last decode loop."""

    num_since_loop: int = 0


@final
@dataclass(frozen=True)
class IterationLevel:
    """New requests join at the next iteration: their prompts are computed in a step of their own.

    While a prompt is computed no answer advances. A prompt longer than a step is cut. At most as
    many requests as there are slots go before answers that stand still: a stream of requests that
    end with their first token would otherwise hold those up for ever.

    Without `compacts`, the memory shuffle of Flover (section V-D), rows of ended answers among the
    live ones are computed on.
    """

    num_device_groups: ClassVar[int] = 1
    makes_way = False
    reserved_slots = 0

    compacts: bool = True

    def new_state(self) -> Admissions:
        return Admissions()

    def select(self, step: StepBuilder, state: Admissions) -> None:
        num_first = step.config.max_slots
        if step.decoding:
            num_first = max(0, num_first - state.num_since_loop)
        for sequence in step.prefilling:
            if step.num_tokens_left == 0:
                break
            step.add_row(sequence, min(sequence.num_uncomputed, step.num_tokens_left))
        for _ in range(num_first):
            sequence = step.admit() if step.num_tokens_left else None
            if sequence is None:
                break
            state.num_since_loop += 1
            step.add_row(sequence, min(sequence.num_uncomputed, step.num_tokens_left))
        is_empty = step.num_tokens_left == step.config.max_step_tokens
        if is_empty and step.add_decode_loop(decode_iterations(step), compacts=self.compacts):
            state.num_since_loop = 0
