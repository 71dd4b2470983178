"""Prefill chunks and decode tokens in one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.scheduling.iteration.decode_loop import decode_iterations
from jaxserve.scheduling.policy import StepBuilder
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class Unified:
    """Every running answer advances by one token; what is left of the step goes to prompts.

    Pensieve's unified batch (section 3.4.2 of the thesis) with chunked prefill; without prompts to
    compute, the step is a decode loop.

    Attributes:
      chunk_tokens: prompt tokens of one step at most; 0 for all that fit.
      max_running: a sequence is admitted only while fewer than this many run; None for as many as
        there are slots. Sequences with a latency bound of their own do not count, and need not
        wait for it. Where more run already (`Scheduler.adopt`), they go on.
      reserved_slots: slots that only sequences with a latency bound of their own may take; one slot
        is always for others. With reserved slots, a sequence with a bound that finds no slot or
        memory has others preempted.
      heeds_arrivals: make decode loops shorter while requests come one by one.
    """

    num_device_groups: ClassVar[int] = 1

    chunk_tokens: int = 0
    max_running: int | None = None
    reserved_slots: int = 0
    heeds_arrivals: bool = False

    def __post_init__(self) -> None:
        if self.max_running is not None and self.max_running < 1:
            raise InvalidConfigError(
                f"max_running={self.max_running} is not allowed; pass at least 1, or None for all "
                "slots"
            )
        if self.reserved_slots < 0:
            raise InvalidConfigError(
                f"reserved_slots={self.reserved_slots} is not allowed; pass at least 0"
            )

    @property
    def makes_way(self) -> bool:
        return self.reserved_slots > 0

    def new_state(self) -> None:
        return None

    def select(self, step: StepBuilder, state: None) -> None:
        self._make_way(step)
        # Only looked for where it matters: that may cost a forecast of all that run.
        if not step.prefilling and not step.first_admissible(only_bounded=self._is_at_limit(step)):
            num = decode_iterations(step, heeds_arrivals=self.heeds_arrivals)
            step.add_decode_loop(num)
            return
        step.add_decoding()
        budget = min(step.num_tokens_left, self.chunk_tokens or step.num_tokens_left)
        for sequence in step.prefilling:
            budget -= self._add_chunk(step, sequence, budget)
        while budget and (sequence := step.admit(only_bounded=self._is_at_limit(step))):
            budget -= self._add_chunk(step, sequence, budget)
            self._make_way(step)
        if not budget:
            step.fetch_next()

    def _make_way(self, step: StepBuilder) -> None:
        if self.makes_way:
            step.make_way()

    def _is_at_limit(self, step: StepBuilder) -> bool:
        """Return whether no more sequences without a latency bound of their own may run."""
        if self.max_running is None and not self.reserved_slots:
            return False
        most = max(1, step.config.max_slots - self.reserved_slots)
        if self.max_running is not None:
            most = min(most, self.max_running)
        return sum(not each.request.has_bounds for each in step.running) >= most

    def _add_chunk(self, step: StepBuilder, sequence: Sequence, budget: int) -> int:
        count = min(sequence.num_uncomputed, budget)
        return count if count and step.add_row(sequence, count) else 0
