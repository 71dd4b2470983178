"""One step while it is being planned: what an iteration shape may do to it."""

from __future__ import annotations

import itertools
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
        # Of each row, beside its sequence.
        self._spans: list[tuple[int, int]] = []
        self._samples: list[bool] = []
        self._admitted: list[Sequence] = []
        self._new_pages: list[tuple[Sequence, int, int]] = []
        self._num_iterations = 1
        self._is_decode_loop = False
        self.has_preempted = False
        self._is_short = False
        self._compacts = True
        self._window: tuple[int, int] | None = None
        self.wake_s: float | None = None

    @property
    def has_rows(self) -> bool:
        return bool(self.sequences)

    @property
    def is_futile(self) -> bool:
        """Whether everything that could have run was preempted."""
        return self.has_preempted and not self.sequences and not self._admitted

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
        """Nobody is admitted into a step that ran out of memory."""
        if self._is_short:
            return []
        return list(itertools.islice(self._scheduler.waiting.ready(), self.config.max_slots))

    @property
    def num_tokens_left(self) -> int:
        return self.config.max_step_tokens - sum(end - start for start, end in self._spans)

    @property
    def num_admitted_since_loop(self) -> int:
        return self._scheduler.num_admitted_since_loop

    def can_admit(self) -> bool:
        return not self._is_short and self._scheduler.first_admissible() is not None

    def admit(self) -> Sequence | None:
        sequence = None if self._is_short else self._scheduler.first_admissible()
        if sequence is not None:
            entries = self._scheduler.admit(sequence)
            self._new_pages += [(sequence, index, page) for index, page in entries]
            self._admitted.append(sequence)
        return sequence

    def add_row(self, sequence: Sequence, num_tokens: int, *, is_decode_loop: bool = False) -> bool:
        num_rows_left = self.config.max_slots - len(self.sequences)
        spans = sequence.next_spans(num_tokens, num_rows_left)
        if sequence.slot is None or not spans or not self._secure(sequence, spans[-1][1]):
            return False
        self._is_decode_loop |= is_decode_loop
        self._advance(sequence, spans)
        return True

    def add_decode_loop(self, max_iterations: int, *, compacts: bool = True) -> None:
        assert not self.sequences, "a decode loop is a step of its own"
        self._make_room_to_decode()
        decoding = self.decoding
        if not decoding:
            return
        count = min(max_iterations, *(s.num_outputs_left for s in decoding))
        if not self._extends:
            count = min(count, *(self._num_reserved_left(s) for s in decoding))
        while count > 1 and not self._fits(count):
            count //= 2
        self._compacts = compacts
        self._num_iterations = count
        for sequence in decoding:
            self.add_row(sequence, count, is_decode_loop=True)

    def add_decoding(self) -> None:
        self._make_room_to_decode()
        for sequence in self.decoding:
            self.add_row(sequence, 1)

    def expected_ends(self, num_iterations: int) -> Seq[float] | None:
        forecast = self._scheduler.lengths.forecast(self.decoding)
        if forecast is None:
            return None
        return forecast.expected_ends(np.arange(1.0, num_iterations + 1)).tolist()

    def add_decode_loop_of(self, sequence: Sequence, max_iterations: int) -> bool:
        assert not self.sequences
        if sequence.slot is None:
            return False
        if self._has_outgrown(sequence):
            self._preempt(sequence, has_outgrown=True)
            return False
        self._window = self._scheduler.slots.window_of_one(sequence.slot)
        if self._window is None:
            return self.add_row(sequence, 1)
        count = min(max_iterations, sequence.num_outputs_left)
        missing = sequence.table.missing(sequence.num_computed + count)
        if missing > (self._scheduler.pool.num_available if self._extends else 0):
            count = 1
        self._num_iterations = count
        return self.add_row(sequence, count, is_decode_loop=True)

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
        admitted = [sequence for sequence in self._admitted if sequence.slot is not None]
        supervisor, keeper = self._scheduler.supervisor, self._scheduler.keeper
        for sequence in self.sequences:
            sequence.num_in_flight += 1
            sequence.last_step = index
        return StepPlan(
            index=index,
            swaps_out=supervisor.copies_out() + keeper.copies_out(),
            swaps_in=supervisor.copies_in(admitted) + keeper.copies_in(),
            releases=releases,
            moves=moves,
            admissions=tuple(map(_admission, admitted)),
            page_updates=tuple(
                (sequence.slot, index, page)
                for sequence, index, page in self._new_pages
                if sequence.slot is not None
            ),
            rows=tuple(
                self._row(sequence, span, samples)
                for sequence, span, samples in zip(
                    self.sequences, self._spans, self._samples, strict=True
                )
            ),
            num_iterations=self._num_iterations,
            window_start=window_start,
            window_size=window_size,
            needs=_needs(self.sequences),
        )

    def _row(self, sequence: Sequence, span: tuple[int, int], samples: bool) -> Row:
        assert sequence.slot is not None
        start, end = span
        return Row(
            slot=sequence.slot,
            sequence_key=sequence.key,
            start=start,
            num_tokens=1 if self._is_decode_loop else end - start,
            samples=samples,
            wants_prompt_logprobs=(
                sequence.wants_prompt_logprobs and start < sequence.prompt_length - 1
            ),
        )

    def _advance(self, sequence: Sequence, spans: Seq[tuple[int, int]]) -> None:
        """After these tokens: a row that reaches the newest token plans the next one."""
        end = spans[-1][1]
        samples = self._is_decode_loop or end == sequence.planned_length
        if samples:
            sequence.num_planned_outputs += end - spans[-1][0] if self._is_decode_loop else 1
        sequence.advance_to(end)
        self._samples += [False] * (len(spans) - 1) + [samples]
        self.sequences += [sequence] * len(spans)
        self._spans += spans
        if spans[0][0] < sequence.prompt_length:
            self._scheduler.keeper.computed(sequence)

    def _fits(self, count: int) -> bool:
        missing = sum(s.table.missing(s.num_computed + count) for s in self.decoding)
        return missing <= self._scheduler.pool.num_available

    def _make_room_to_decode(self) -> None:
        """Let every decoding sequence that stays have pages for its next token."""
        for sequence in self.decoding:
            if self._has_outgrown(sequence):
                self._preempt(sequence, has_outgrown=True)
        while not self._fits(1):
            self._preempt_one()

    def _secure(self, sequence: Sequence, length: int) -> bool:
        """Own the pages for `length` tokens, preempting others for them."""
        if not self._extends and sequence.table.missing(length):
            self._preempt(sequence, has_outgrown=True)
            return False
        while not sequence.table.reserve(length):
            if self._preempt_one() is sequence:
                return False
        entries = sequence.table.grow(length)
        self._new_pages += [(sequence, index, page) for index, page in entries]
        return True

    def _preempt_one(self) -> Sequence:
        """Whom the policy chooses of those without a row; never the first, while there are others.

        So the first in order always gets on, and then the next.
        """
        running = self._scheduler.running
        candidates = [s for s in running[1:] if s not in self.sequences] or running[:1]
        victim = self._scheduler.policy.preemption.victim(candidates, self._scheduler.lengths)
        self._is_short = True
        self._preempt(victim)
        return victim

    def _preempt(self, sequence: Sequence, *, has_outgrown: bool = False) -> None:
        self.has_preempted = True
        self._scheduler.preempt(sequence, has_outgrown=has_outgrown)

    @property
    def _extends(self) -> bool:
        return self._scheduler.policy.admission.extends

    def _num_reserved_left(self, sequence: Sequence) -> int:
        """Tokens that fit into its reservation yet."""
        return sequence.table.num_reserved * self.config.page_size - sequence.num_computed

    def _has_outgrown(self, sequence: Sequence) -> bool:
        return not self._extends and self._num_reserved_left(sequence) <= 0

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
