"""Continuous batching: requests join the running batch at any iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.scheduling.policy import StepBuilder
from jaxserve.scheduling.sequence import Sequence

# The cost of beginning a loop, as a share of one iteration.
_START_COST = 0.02
# The same in seconds, if no sequence waits: less than the 2 ms measured on a host whose two cores
# are the device, too, and more than on a device that works while the host plans.
_START_S = 0.001
# A request that arrives waits for half of a loop, and for one that was submitted after it. Engines
# submit that late, so that most wait for half of a loop only; counted as 0.9, loops were longer and
# first tokens a fifth later (simulated, GPT-J and LLAMA 33B).
_LOOPS_BEFORE = 1.5


def decode_iterations(step: StepBuilder, *, heeds_arrivals: bool = False) -> int:
    """Return all iterations that were compiled, or fewer while sequences wait or arrive.

    A loop of N iterations costs its start, and leaves the place of an answer that ends in it unused
    for N / 2 iterations on average. With one end every L tokens of a row, the sum is least at N =
    sqrt(2 * start * L). If nothing is known of lengths, N is a quarter of the most. The loop is cut
    at the first length limit anyway. `heeds_arrivals` also applies `_before_arrivals`.
    """
    most = step.config.max_decode_iterations
    if not step.has_waiting:
        return _before_arrivals(step) if heeds_arrivals else most
    ends = step.expected_ends(most)
    if ends is None:
        return max(1, most // 4)
    tokens_an_end = most * len(step.decoding) / max(ends[-1], 1e-9)
    return min(most, max(1, round(math.sqrt(2 * _START_COST * tokens_an_end))))


def _before_arrivals(step: StepBuilder) -> int:
    """Return the iterations of a loop while requests arrive during other requests' steps.

    A loop of N iterations of t seconds delays each of its B sequences by its start, s / N an
    iteration. It delays arriving ones, r a second, by 1.5 N t, so 1.5 r N t^2 an iteration. The sum
    is least at N = sqrt(B s / (1.5 r)) / t.
    """
    expected = step.expected_arrivals()
    if expected is None:
        return step.config.max_decode_iterations
    rate, iteration_s = expected
    num = math.sqrt(len(step.decoding) * _START_S / (_LOOPS_BEFORE * rate)) / max(iteration_s, 1e-9)
    return max(1, round(min(num, step.config.max_decode_iterations)))


@final
@dataclass
class Admissions:
    """Counts the sequences admitted since the last decode loop."""

    num_since_loop: int = 0


@final
@dataclass(frozen=True)
class IterationLevel:
    """New requests join at the next iteration: their prompts are computed in a step of their own.

    While a prompt is computed no answer advances. A prompt longer than a step is cut. At most as
    many requests as there are slots are prefilled before the running answers advance; otherwise a
    stream of one-token requests would block these for ever.

    Without `compacts`, the memory shuffle of Flover (section V-D), rows of ended answers among the
    live ones are still computed.
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


@final
@dataclass(frozen=True)
class Unified:
    """Every running answer advances by one token; the rest of the step goes to prompts.

    Pensieve's unified batch (section 3.4.2 of the thesis) with chunked prefill; without prompts to
    compute, the step is a decode loop.

    Attributes:
      chunk_tokens: the most prompt tokens of one step; 0 for all that fit.
      max_running: a sequence is admitted only while fewer than this many run; None for as many as
        there are slots. Sequences with a latency bound of their own do not count and do not wait
        for it. If more run already (`Scheduler.adopt`), they continue.
      reserved_slots: slots that only sequences with a latency bound of their own may take; one slot
        is always for other sequences. With reserved slots, a sequence with a bound that finds no
        slot or memory preempts sequences without.
      heeds_arrivals: make decode loops shorter while requests arrive one by one.
      preempts: a waiting sequence preempts running ones after it in order, not only for memory.
    """

    num_device_groups: ClassVar[int] = 1

    chunk_tokens: int = 0
    max_running: int | None = None
    reserved_slots: int = 0
    heeds_arrivals: bool = False
    preempts: bool = False

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
        # Only looked for if it matters: it may cost a forecast of all running sequences.
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
        if self.makes_way or self.preempts:
            step.make_way(only_bounded=not self.preempts)

    def _is_at_limit(self, step: StepBuilder) -> bool:
        if self.max_running is None and not self.reserved_slots:
            return False
        most = max(1, step.config.max_slots - self.reserved_slots)
        if self.max_running is not None:
            most = min(most, self.max_running)
        return sum(not each.request.has_bounds for each in step.running) >= most

    def _add_chunk(self, step: StepBuilder, sequence: Sequence, budget: int) -> int:
        count = min(sequence.num_uncomputed, budget)
        return count if count and step.add_row(sequence, count) else 0
