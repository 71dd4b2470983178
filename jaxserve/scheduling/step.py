"""One step while it is being planned: what an iteration shape may do to it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, final

import numpy as np

from jaxserve.scheduling.plan import Admission, Needs, Row, StepPlan
from jaxserve.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from jaxserve.scheduling.scheduler import Scheduler


@final
class Step:
    """Collects rows; every row takes its pages and advances its sequence at once."""

    def __init__(self, scheduler: Scheduler):
        self.config = scheduler.config
        self.sequences: list[Sequence] = []
        self._scheduler = scheduler
        self._counts: list[int] = []
        self._samples: list[bool] = []
        self._admitted: list[Sequence] = []
        self._new_pages: list[tuple[Sequence, int, int]] = []
        self._num_iterations = 1
        self._is_decode_loop = False
        self._has_preempted = False
        self._compacts = True
        self._window: tuple[int, int] | None = None
        self.wake_s: float | None = None

    @property
    def has_rows(self) -> bool:
        return bool(self.sequences)

    @property
    def now_s(self) -> float:
        return self._scheduler.now()

    @property
    def running(self) -> Seq[Sequence]:
        return tuple(self._scheduler.running)

    @property
    def decoding(self) -> Seq[Sequence]:
        return [s for s in self._scheduler.running if s.num_uncomputed == 1]

    @property
    def prefilling(self) -> Seq[Sequence]:
        return [s for s in self._scheduler.running if s.num_uncomputed > 1]

    @property
    def waiting(self) -> Seq[Sequence]:
        """Nobody is admitted into a step that preempted: the memory is short."""
        return [] if self._has_preempted else self._scheduler.admissible()

    @property
    def num_tokens_left(self) -> int:
        return self.config.max_step_tokens - sum(self._counts)

    @property
    def num_admitted_since_loop(self) -> int:
        return self._scheduler.num_admitted_since_loop

    def can_admit(self, sequence: Sequence) -> bool:
        return self._scheduler.can_admit(sequence)

    def admit(self, sequence: Sequence) -> bool:
        if not self.can_admit(sequence):
            return False
        entries = self._scheduler.admit(sequence)
        self._new_pages += [(sequence, index, page) for index, page in entries]
        self._admitted.append(sequence)
        return True

    def add_row(self, sequence: Sequence, num_tokens: int, *, is_decode_loop: bool = False) -> bool:
        if sequence.slot is None or not self._secure(sequence, num_tokens):
            return False
        self._is_decode_loop |= is_decode_loop
        self._advance(sequence, num_tokens)
        return True

    def add_decode_loop(self, max_iterations: int, *, compacts: bool = True) -> None:
        assert not self.sequences, "a decode loop is a step of its own"
        if not self.decoding:
            return
        count = min(max_iterations, *(s.num_outputs_left for s in self.decoding))
        while count > 1 and not self._fits(count):
            count //= 2
        self._compacts = compacts
        self._num_iterations = count
        for sequence in self.decoding:
            self.add_row(sequence, count, is_decode_loop=True)

    def add_decode_loop_of(self, sequence: Sequence, max_iterations: int) -> None:
        assert not self.sequences and sequence.slot is not None
        self._window = self._scheduler.slots.window_of_one(sequence.slot)
        if self._window is None:
            self.add_row(sequence, 1)
            return
        count = min(max_iterations, sequence.num_outputs_left)
        missing = sequence.table.missing(sequence.num_computed + count)
        if missing > self._scheduler.pool.num_available:
            count = 1
        self._num_iterations = count
        self.add_row(sequence, count, is_decode_loop=True)

    def wait_until(self, time_s: float) -> None:
        self.wake_s = time_s

    def finish(self, index: int, releases: tuple[int, ...]) -> StepPlan:
        """The plan; slots are compacted before a decode loop."""
        moves: tuple[tuple[int, int], ...] = ()
        window_start, window_size = 0, 0
        if self._is_decode_loop:
            if self._window is None and self._compacts:
                moves = tuple(self._compact())
            window_start, window_size = self._window or self._scheduler.slots.window()
        for sequence in self.sequences:
            sequence.num_in_flight += 1
            sequence.last_step = index
        return StepPlan(
            index=index,
            releases=releases,
            moves=moves,
            admissions=tuple(_admission(s) for s in self._admitted if s.slot is not None),
            page_updates=tuple(
                (sequence.slot, index, page)
                for sequence, index, page in self._new_pages
                if sequence.slot is not None
            ),
            rows=tuple(
                self._row(sequence, count, samples)
                for sequence, count, samples in zip(
                    self.sequences, self._counts, self._samples, strict=True
                )
            ),
            num_iterations=self._num_iterations,
            window_start=window_start,
            window_size=window_size,
            needs=_needs(self.sequences),
        )

    def _row(self, sequence: Sequence, count: int, samples: bool) -> Row:
        assert sequence.slot is not None
        start = sequence.num_computed - count
        return Row(
            slot=sequence.slot,
            sequence_key=sequence.key,
            start=start,
            num_tokens=1 if self._is_decode_loop else count,
            samples=samples,
            wants_prompt_logprobs=(
                sequence.wants_prompt_logprobs and start < sequence.prompt_length - 1
            ),
        )

    def _advance(self, sequence: Sequence, count: int) -> None:
        """After `count` tokens: a row that reaches the newest token plans the next one."""
        samples = self._is_decode_loop or sequence.num_uncomputed == count
        if samples:
            sequence.num_planned_outputs += count if self._is_decode_loop else 1
        sequence.num_computed += count
        self._samples.append(samples)
        self.sequences.append(sequence)
        self._counts.append(count)

    def _fits(self, count: int) -> bool:
        missing = sum(s.table.missing(s.num_computed + count) for s in self.decoding)
        return missing <= self._scheduler.pool.num_available

    def _secure(self, sequence: Sequence, count: int) -> bool:
        """Own the pages for `count` more tokens, preempting later sequences for them."""
        length = sequence.num_computed + count
        while not sequence.table.reserve(length):
            victim = next(s for s in reversed(self._scheduler.running) if s not in self.sequences)
            self._has_preempted = True
            self._scheduler.preempt(victim)
            if victim is sequence:
                return False
        entries = sequence.table.grow(length)
        self._new_pages += [(sequence, index, page) for index, page in entries]
        return True

    def _compact(self) -> list[tuple[int, int]]:
        moves = self._scheduler.slots.compact()
        targets = dict(moves)
        for sequence in self._scheduler.running:
            if sequence.slot in targets:
                sequence.slot = targets[sequence.slot]
        return moves


def _admission(sequence: Sequence) -> Admission:
    assert sequence.slot is not None
    return Admission(
        slot=sequence.slot,
        request=sequence.request,
        sample_index=sequence.sample_index,
        tokens=np.asarray(sequence.known_tokens, np.int32),
        max_length=sequence.max_length,
    )


def _needs(sequences: Seq[Sequence]) -> Needs:
    params = [sequence.request.params for sequence in sequences]
    return Needs(
        random=any(not p.is_greedy for p in params),
        truncation=any(not p.is_greedy and (p.top_k or p.top_p < 1 or p.min_p) for p in params),
        penalties=any(
            p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty for p in params
        ),
        constraints=any(p.logit_bias or p.min_tokens for p in params),
        logprobs=any(p.logprobs is not None for p in params),
        top_logprobs=any(p.logprobs for p in params),
    )
