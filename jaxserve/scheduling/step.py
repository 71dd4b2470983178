"""One step while it is being planned: the `StepBuilder` of iteration shapes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from typing import final

import numpy as np

from jaxserve.scheduling.kv.manager import Growth, KVManager
from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.plan import LINK, Row, StepPlan
from jaxserve.scheduling.policy import MAX_ADMITTED, Policy, Preemption
from jaxserve.scheduling.queues import Queues, admission, handover
from jaxserve.scheduling.sequence import Sequence, split
from jaxserve.scheduling.speculation import NOT_SPECULATING, Speculation


@final
class StepRows:
    """The rows of a step in order; each of the host's `num_proposed` tokens takes one, too."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.num_taken = self.num_tokens = self.num_proposed = 0
        # Of each row.
        self._spans: list[tuple[int, int]] = []
        self._max_new: list[int] = []
        self._proposed: list[tuple[int, ...]] = []
        self._num_pooled: list[int] = []

    @property
    def encodes(self) -> bool:
        pairs = zip(self.sequences, self._spans, strict=True)
        return any(start < sequence.request.num_encoded for sequence, (start, _) in pairs)

    def add(
        self,
        sequence: Sequence,
        spans: Seq[tuple[int, int]],
        max_new_tokens: int,
        proposed: tuple[int, ...],
    ) -> None:
        """Add a row for each of a sequence's spans; the last one samples and has the proposals."""
        num_before = len(spans) - 1
        self.sequences += [sequence] * len(spans)
        self._spans += spans
        self._max_new += [0] * num_before + [max_new_tokens]
        self._proposed += [()] * num_before + [proposed]
        pooled = sequence.pooled
        self._num_pooled += [0 if pooled is None else pooled.plan(*span) for span in spans]
        self.num_tokens += sum(last - first for first, last in spans)
        self.num_proposed += len(proposed)
        self.num_taken += len(spans) + len(proposed)

    def add_newest(self, sequence: Sequence, length: int) -> None:
        self.sequences.append(sequence)
        self._spans.append((length - 1, length))
        self._max_new.append(1)
        self._proposed.append(())
        self._num_pooled.append(0)
        self.num_tokens += 1
        self.num_taken += 1

    def planned(self, *, is_decode_loop: bool) -> tuple[Row, ...]:
        own = self._spans, self._max_new, self._proposed, self._num_pooled
        each = zip(self.sequences, *own, strict=True)
        return tuple([_row(*row, is_decode_loop) for row in each])


def _row(
    sequence: Sequence,
    span: tuple[int, int],
    max_new_tokens: int,
    proposed: tuple[int, ...],
    num_pooled: int,
    is_decode_loop: bool,
) -> Row:
    assert sequence.slot is not None
    start, end = span
    if start >= sequence.prompt_length - 1 and not num_pooled:  # true for almost all
        num_tokens = 1 if is_decode_loop else end - start
        return Row(
            sequence.slot, sequence.key, start, num_tokens, max_new_tokens, proposed=proposed
        )
    encodes = start < sequence.request.num_encoded
    if encodes:
        end -= sequence.request.num_padding
    return Row(
        slot=sequence.slot,
        sequence_key=sequence.key,
        start=start,
        num_tokens=1 if is_decode_loop else end - start,
        max_new_tokens=max_new_tokens,
        wants_prompt_logprobs=sequence.wants_prompt_logprobs,
        encodes=encodes,
        proposed=proposed,
        num_pooled=num_pooled,
    )


@final
class Victims:
    """The running sequences without a row, as the policy ranks them for preemption.

    They are ranked once for all preemptions of a step: an estimate of what a sequence will need
    changes only when it gets a row, and then it can no longer be preempted.
    """

    def __init__(self, preemption: Preemption, lengths: LengthTracker):
        self._preemption = preemption
        self._lengths = lengths
        # The next one last; None before they are ranked.
        self._ranked: list[Sequence] | None = None

    def forget_ranks(self) -> None:
        self._ranked = None

    def next(self, running: Seq[Sequence], have_rows: Collection[Sequence]) -> Sequence:
        """Return the sequence to preempt: the first running one if all other ones have rows."""
        if self._ranked is None:
            candidates = [each for each in running[1:] if each not in have_rows]
            self._ranked = [*reversed(self._preemption.ranked(candidates, self._lengths))]
        while self._ranked:
            victim = self._ranked.pop()
            runs = victim.slot is not None and victim not in have_rows
            if runs and victim is not running[0]:
                return victim
        return running[0]


@final
class Step:
    """Collects rows; every row takes its pages and advances its sequence at once.

    The policy lets the device idle until `wake_s`, if it is set.
    """

    def __init__(
        self,
        queues: Queues,
        kv: KVManager,
        policy: Policy,
        lengths: LengthTracker,
        speculation: Speculation,
        now: Callable[[], float],
        open_groups: Collection[int],
    ):
        self.config = kv.config
        self._rows = StepRows()
        self.sequences = self._rows.sequences
        self.wake_s: float | None = None
        self.open_groups = open_groups
        self._group = 0
        self._handovers: list[tuple[Sequence, int]] = []
        queues.begin_step()
        self._queues = queues
        self._kv = kv
        self._lengths = lengths
        self._speculation = speculation
        self._extends = policy.admission.extends
        self._now = now
        self._admitted: list[Sequence] = []
        self._new_pages: list[tuple[Sequence, int, int]] = []
        self._num_iterations, self._speculating = 1, NOT_SPECULATING
        self._is_decode_loop = False
        self._has_preempted = self._is_short = self._is_full = False
        self._compacts, self._min_rows = True, 0
        self._window: tuple[int, int] | None = None
        self._victims = Victims(policy.preemption, lengths)
        # Known until a sequence advances, or other ones run.
        self._decoding_and_prefilling: tuple[Seq[Sequence], Seq[Sequence]] | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.sequences or self._handovers) or self._kv.restores_in(self.open_groups)

    @property
    def is_futile(self) -> bool:
        """Whether everything that could have run was preempted."""
        return self._has_preempted and not self.sequences and not self._admitted

    # ---- what an iteration shape reads ----

    @property
    def now_s(self) -> float:
        return self._now()

    @property
    def running(self) -> Seq[Sequence]:
        return tuple(self._queues.running)

    @property
    def decoding(self) -> Seq[Sequence]:
        return self._split()[0]

    @property
    def prefilling(self) -> Seq[Sequence]:
        return self._split()[1]

    def _split(self) -> tuple[Seq[Sequence], Seq[Sequence]]:
        if self._decoding_and_prefilling is None:
            self._decoding_and_prefilling = split(self._queues.running, self._group)
        return self._decoding_and_prefilling

    @property
    def waiting(self) -> Seq[Sequence]:
        return list(itertools.islice(self._ready(), self.config.max_slots))

    @property
    def has_waiting(self) -> bool:
        return next(self._ready(), None) is not None

    def _ready(self) -> Iterator[Sequence]:
        return iter(()) if self._is_short else self._queues.waiting.ready()

    @property
    def num_tokens_left(self) -> int:
        return 0 if self._is_full else max(0, self.config.max_step_tokens - self._rows.num_tokens)

    def expected_arrivals(self) -> tuple[float, float] | None:
        return self._queues.expected_arrivals()

    def expected_ends(self, num_iterations: int) -> Seq[float] | None:
        forecast = self._lengths.forecast(self.decoding)
        if forecast is None:
            return None
        return forecast.expected_ends(np.arange(1.0, num_iterations + 1)).tolist()

    # ---- what it does ----

    def first_admissible(self, *, only_bounded: bool = False) -> Sequence | None:
        return None if self._is_closed else self._queues.first_admissible(only_bounded)

    @property
    def _is_closed(self) -> bool:
        return self._is_short or len(self._admitted) >= MAX_ADMITTED

    def fetch_next(self) -> None:
        self._queues.fetch_next()

    def admit(self, *, only_bounded: bool = False) -> Sequence | None:
        sequence = self.first_admissible(only_bounded=only_bounded)
        if sequence is not None:
            entries = self._queues.admit(sequence)
            self._new_pages += [(sequence, index, page) for index, page in entries]
            self._admitted.append(sequence)
            self._victims.forget_ranks()
            self._decoding_and_prefilling = None
        return sequence

    def make_way(self, *, only_bounded: bool = True) -> Sequence | None:
        first = next(iter(self._queues.waiting.ready()), None)
        if self._is_closed or first is None or (only_bounded and not first.request.has_bounds):
            return None
        have_rows, keys = set(self.sequences), self._queues.keys
        awaits_disk = self._kv.awaits_disk(first)
        while (sequence := self.first_admissible()) is None:
            others = [
                each
                for each in self._queues.running
                if not (only_bounded and each.request.has_bounds) and each not in have_rows
                # A sample waits for the prompt pages of its request's first one.
                if keys.of(each) > keys.of(first) and each is not first.primary
            ]
            if awaits_disk or not others:  # room alone does not make it admissible
                return None
            self._preempt(others[-1])
        return sequence if sequence.request.has_bounds or not only_bounded else None

    def use_group(self, group: int) -> None:
        assert not self.has_work and group in self.open_groups, "a step of one open group"
        self._group, self._decoding_and_prefilling = group, None

    def hand_over(self, sequence: Sequence, target: int) -> None:
        assert not self.sequences and not sequence.num_in_flight, "KV that is not complete"
        assert LINK in self.open_groups and sequence.slot is not None, "nothing to hand over"
        self._handovers.append((sequence, target))

    def add_row(self, sequence: Sequence, num_tokens: int, proposed: tuple[int, ...] = ()) -> bool:
        assert sequence.kv.group == self._group, "the KV is in another group's memory"
        spans = self._next_spans(sequence, num_tokens + len(proposed))
        if sequence.slot is None or not spans or not sequence.may_grow:
            return False
        if not self._secure(sequence, spans[-1][1]):
            return False
        self._advance(sequence, spans, proposed)
        return True

    def _next_spans(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Return [start, end) of the next tokens to compute, no row over an encoder prompt's end.

        An encoder computes its prompt whole. The first such prompt of a step always fits, since
        programs of its own compute it; any other must fit together with the step's rows. If it does
        not, the step takes no more tokens, so that no later sequence passes this one.
        """
        num_encoded = sequence.request.num_encoded
        num_tokens = sequence.kv.num_allowed(num_tokens)
        num_rows_left = self.config.max_slots - self._rows.num_taken
        if sequence.kv.num_computed >= num_encoded:
            return sequence.kv.next_spans(num_tokens, num_rows_left)
        if not num_rows_left:
            return []
        num_tokens_with = self._rows.num_tokens + num_encoded
        if num_tokens_with > self.config.max_step_tokens and self._rows.encodes:
            self._is_full = True
            return []
        (_, end), *rest = sequence.kv.next_spans(max(num_tokens, num_encoded), num_rows_left)
        spans = [(0, num_encoded), (num_encoded, end), *rest]
        return [span for span in spans if span[0] < span[1]][:num_rows_left]

    def add_decoding(self) -> None:
        decoding = self._with_room_to_decode([*self.decoding])
        spare = self.num_tokens_left - len(decoding)
        suggests = self._speculation.has_suggested
        for sequence in decoding:
            if not suggests and self._add_newest(sequence):
                continue
            count = min(sequence.num_uncomputed, 1 + max(0, spare))
            proposed = () if count < sequence.num_uncomputed else self._suggested(sequence, spare)
            is_added = self.add_row(sequence, count, proposed)
            spare -= count + len(proposed) - 1 if is_added else -1
        self._queues.have_advanced()

    def _add_newest(self, sequence: Sequence) -> bool:
        """Add the one row of most answers at a fraction of the cost of `add_row`, if possible."""
        if not sequence.is_steady or self._rows.num_taken == self.config.max_slots:
            return False
        if not self._kv.compute_newest(sequence):
            return False
        self._rows.add_newest(sequence, sequence.kv.num_computed)
        sequence.plan(1)
        return True

    def _suggested(self, sequence: Sequence, spare: int) -> tuple[int, ...]:
        """Return what the host proposes; nothing if it does not fit with all other rows."""
        found = self._speculation.suggested(sequence)
        rows_left = self.config.max_slots - len(self._queues.running) - self._rows.num_proposed
        num = sequence.num_uncomputed + len(found)
        table, end = sequence.kv.table, sequence.kv.num_computed + num
        missing = 0 if end <= table.max_end else sys.maxsize
        missing = missing or table.num_missing(end)
        fits = missing <= (self._kv.num_available if self._extends else 0) and num <= 1 + spare
        return found if fits and len(found) < min(rows_left + 1, sequence.num_outputs_left) else ()

    def add_decode_loop(
        self, max_iterations: int, *, compacts: bool = True, min_rows: int = 0
    ) -> int:
        assert not self.sequences, "a decode loop is a step of its own"
        awaits = any(s.awaits_token for s in self._queues.running if s.kv.group == self._group)
        # Two steps with half of the sequences each take longer than one with all of them.
        able = [s for s in self.decoding if not (awaits and s.awaits_tokens)]
        decoding = self._with_room_to_decode(able)
        if not decoding:
            return 0
        if any(sequence.awaits_tokens for sequence in decoding):
            self.add_decoding()
            return 1
        max_iterations = 1 if awaits or self._kv.restores_in(self.open_groups) else max_iterations
        left = [sequence.num_outputs_left for sequence in decoding]
        if not self._extends:
            left = [min(n, s.kv.num_reserved_left) for n, s in zip(left, decoding, strict=True)]
        self._speculating = self._speculation.next_loop(decoding) or NOT_SPECULATING
        count, most = min(max_iterations, *left), [1] * len(decoding)
        if decoding[0].kv.grid_tokens is not None:
            count = min(sequence.kv.num_allowed(count) for sequence in decoding)
        if self._speculating.num_proposed:
            most = [self._speculation.most_tokens(s, len(decoding)) for s in decoding]
        growth = Growth(decoding, self.config)
        while (num := count * max(most)) > 1 and growth.num_missing(num) > self._kv.num_available:
            if count == 1:
                self._speculating, most = NOT_SPECULATING, [1] * len(decoding)
            count = max(1, count // 2)
        self._compacts, self._min_rows = compacts, min_rows
        self._num_iterations, self._is_decode_loop = count, True
        for sequence, num_left, num in zip(decoding, left, most, strict=True):
            self.add_row(sequence, min(count * num, num_left))
        return count

    def add_decode_loop_of(self, sequence: Sequence, max_iterations: int) -> bool:
        assert not self.sequences, "a decode loop is a step of its own"
        if sequence.slot is None or not sequence.may_grow:
            return False
        if sequence.awaits_tokens:
            return self.add_row(sequence, min(sequence.num_uncomputed, self.num_tokens_left))
        if self._has_outgrown(sequence):
            self._preempt(sequence, has_outgrown=True)
            return False
        self._window = self._queues.slots[self._group].window_of_one(sequence.slot)
        if self._window is None:
            return self.add_row(sequence, 1)
        count = sequence.kv.num_allowed(min(max_iterations, sequence.num_outputs_left))
        missing = sequence.kv.table.num_missing(sequence.kv.num_computed + count)
        if missing > (self._kv.num_available if self._extends else 0):
            count = 1
        self._num_iterations = count
        self._is_decode_loop = True
        self._is_decode_loop = self.add_row(sequence, count)
        return self._is_decode_loop

    def wait_until(self, time_s: float) -> None:
        self.wake_s = time_s

    # ---- the plan ----

    def finish(self, index: int) -> StepPlan:
        """Return the plan. Slots are compacted before a decode loop."""
        if self._handovers:
            handovers = tuple(handover(*each) for each in self._handovers)
            return StepPlan(index=index, num_iterations=0, handovers=handovers, group=LINK)
        queues, group = self._queues, self._group
        releases = queues.take_released(group)
        moves: tuple[tuple[int, int], ...] = ()
        window_start, window_size = 0, 0
        if self._is_decode_loop:
            if self._window is None and self._compacts:
                moves = queues.compact(group)
            slots = queues.slots[group]
            window_start, window_size = self._window or slots.window(self._min_rows)
        if arrived := queues.take_arrived(group):
            self._new_pages = [each for each in self._new_pages if each[0] not in arrived]
        for sequence in arrived:
            self._new_pages += [(sequence, *entry) for entry in sequence.kv.table.entries()]
        admitted = [sequence for sequence in self._admitted if sequence.slot is not None]
        for sequence in self.sequences:
            sequence.submitted()
        swaps_out, swaps_in = self._kv.copies(admitted)
        saves, restores = self._kv.state_copies(admitted)
        return StepPlan(
            index=index,
            saves=saves,
            swaps_out=swaps_out,
            swaps_in=swaps_in,
            restores=restores,
            releases=releases,
            moves=moves,
            admissions=tuple(map(admission, [*admitted, *arrived])),
            extensions=queues.take_extensions(group),
            page_updates=tuple(
                (sequence.slot, index, page)
                for sequence, index, page in self._new_pages
                if sequence.slot is not None
            ),
            rows=self._rows.planned(is_decode_loop=self._is_decode_loop),
            num_iterations=self._num_iterations,
            num_proposed=self._speculating.num_proposed,
            verify_cost=self._speculating.verify_cost,
            forgets_answers=self._speculation.take_forgetting(group),
            window_start=window_start,
            window_size=window_size,
            group=group,
        )

    def _advance(
        self, sequence: Sequence, spans: Seq[tuple[int, int]], proposed: tuple[int, ...]
    ) -> None:
        """Advance a sequence: a row that reaches the newest token plans the next one."""
        keeps_split = not (proposed or self._speculating.num_proposed) and sequence.is_steady
        if not (keeps_split and sequence.is_decoding):
            self._decoding_and_prefilling = None
        start, end = spans[-1]
        is_at_end = end == sequence.planned_length + len(proposed)
        max_new_tokens = end - start if self._is_decode_loop else int(is_at_end) + len(proposed)
        if sequence.pooled is not None:
            max_new_tokens = 0
        may_fall_short = self._speculating.num_proposed > 0 or bool(proposed)
        sequence.plan(max_new_tokens, may_fall_short=may_fall_short)
        self._rows.add(sequence, spans, max_new_tokens, proposed)
        self._kv.computed(sequence, spans[0][0], end)

    # ---- memory ----

    def _with_room_to_decode(self, decoding: list[Sequence]) -> list[Sequence]:
        """Preempt until the decoding sequences that stay have pages for their next tokens."""
        if not self._extends:
            for sequence in decoding:
                if self._has_outgrown(sequence):
                    self._preempt(sequence, has_outgrown=True)
            decoding = [s for s in decoding if s.slot is not None]
        while Growth(decoding, self.config).num_missing(1) > self._kv.num_available:
            self._preempt_one()
            decoding = [s for s in decoding if s.slot is not None]
        return decoding

    def _secure(self, sequence: Sequence, length: int) -> bool:
        """Own the pages for `length` tokens, preempting other sequences for them."""
        if length <= sequence.kv.table.num_tokens:
            return True
        if not self._extends and sequence.kv.table.num_missing(length):
            self._preempt(sequence, has_outgrown=True)
            return False
        while not self._kv.reserve(sequence, length):
            if self._preempt_one() is sequence:
                return False
        self._new_pages += [(sequence, *entry) for entry in self._kv.allocate(sequence, length)]
        return True

    def _preempt_one(self) -> Sequence:
        """Preempt the policy's victim without a row; the first in order last, so it advances."""
        victim = self._victims.next(self._queues.running, set(self.sequences))
        self._is_short = True
        self._preempt(victim)
        return victim

    def _preempt(self, sequence: Sequence, *, has_outgrown: bool = False) -> None:
        self._has_preempted, self._decoding_and_prefilling = True, None
        self._queues.preempt(sequence, has_outgrown=has_outgrown)

    def _has_outgrown(self, sequence: Sequence) -> bool:
        return not self._extends and sequence.kv.num_reserved_left <= 0
