"""Waiting and running sequences, and the transitions between them."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Callable
from typing import final

from jaxserve.scheduling.kv.manager import KVManager
from jaxserve.scheduling.kv.swap_space import preempt_all_s
from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.order import OrderKeys
from jaxserve.scheduling.plan import Admission, Extension, Handover
from jaxserve.scheduling.policy import MAX_ADMITTED, Headroom, Policy
from jaxserve.scheduling.sequence import Phase, Sequence
from jaxserve.scheduling.slack import Pace, Slack
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.scheduling.waiting_pool import WaitingPool

# Number of newest arrivals that count.
_NUM_RECENT = 16
# Requests that arrive within this time of each other arrive together.
_TOGETHER_S = 0.01


@final
class Arrivals:
    """The rate of requests that arrive while other requests run or wait.

    Only those wait for what the device is doing. Requests that arrive together count once, so that
    a batch is one arrival; requests that are each sent when the last was answered do not count.
    """

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self._newest_s = float("-inf")

    def note(self, now_s: float, *, is_busy: bool) -> None:
        """Count an arrival; `is_busy` says whether other requests ran or waited."""
        if is_busy and now_s - self._newest_s > _TOGETHER_S:
            self._times_s.append(now_s)
        self._newest_s = now_s

    def rate(self, now_s: float) -> float:
        """Return the expected arrivals a second; 0 if none is known.

        It is the newest arrivals after the first, over the time since then, so it falls with time.
        """
        if len(self._times_s) < 2:
            return 0.0
        return (len(self._times_s) - 1) / max(now_s - self._times_s[0], 1e-9)


@final
class Queues:
    """Moves sequences between the waiting pool and the slots of the device batch.

    Attributes:
      keys: the sort key of every sequence in the policy's order.
      waiting, running: sequences without and with a slot, in the policy's order.
      bounded: running sequences with a latency bound of their own.
      slots: of each device group's batch; at most `max_slots` are live in all of them together.
    """

    def __init__(
        self,
        policy: Policy,
        kv: KVManager,
        lengths: LengthTracker,
        now: Callable[[], float],
        pace: Callable[[], Pace | None],
    ):
        config = kv.config
        self.keys = OrderKeys(policy.order, lengths)
        self.waiting = WaitingPool(
            self.keys, policy.order.max_passes, config.page_size, self._least_pages
        )
        self.running: list[Sequence] = []
        self.bounded: dict[int, Sequence] = {}
        self.slots = tuple(
            SlotTable(config.max_slots, config.slot_buckets)
            for _ in range(policy.num_device_groups)
        )
        self.num_preemptions = 0
        self.arrivals = Arrivals()
        self._policy = policy
        self._kv = kv
        self._lengths = lengths
        self._now = now
        self._pace = pace
        # Of the step that is being planned, once computed.
        self._slack: Slack | None = None
        self._headroom: Headroom | None = None
        # Of each group, since its last step.
        self._released: list[list[int]] = [[] for _ in self.slots]
        self._arrived: list[list[Sequence]] = [[] for _ in self.slots]
        # (sequence, position of the first of its new tokens)
        self._extended: list[list[tuple[Sequence, int]]] = [[] for _ in self.slots]

    def tokens_to_reserve(self, sequence: Sequence) -> int:
        wanted = self._policy.admission.reserve_tokens(sequence, self._lengths)
        return min(max(wanted, sequence.planned_length + 1), sequence.max_length)

    def expected_arrivals(self) -> tuple[float, float] | None:
        rate = self.arrivals.rate(self._now())
        pace = self._pace() if rate else None
        return None if pace is None else (rate, pace.decode_s)

    def begin_step(self) -> None:
        """Record that another step is being planned, at another time."""
        self._slack = None
        self._headroom = None

    def have_advanced(self) -> None:
        if self._headroom is not None:
            self._headroom.advanced()

    def first_admissible(self, only_bounded: bool = False) -> Sequence | None:
        """Return the first waiting sequence that fits, if it may pass those before it.

        One that waits so that running sequences with a latency bound are in time is passed by the
        first one with a bound of its own. `only_bounded` passes all without a bound, if the first
        of them fits.
        """
        if len(self.running) == self._kv.config.max_slots:
            return None
        if not only_bounded:
            sequence = self._first_that()
            if sequence is None or not self._is_held_back(sequence):
                return sequence
        if not self.waiting.has_bounded:
            return None
        return self._first_that(only_bounded=True)

    def fetch_next(self) -> None:
        first = next(self.waiting.ready(), None)
        if first is not None:
            self._kv.awaits_disk(first)

    def _first_that(self, *, only_bounded: bool = False) -> Sequence | None:
        kv = self._kv
        return self.waiting.first_that(
            self._fits, kv.awaits_disk, kv.num_available, only_bounded=only_bounded
        )

    def _is_held_back(self, sequence: Sequence) -> bool:
        is_bulk = not sequence.request.has_bounds and self._policy.order.heeds_bounds
        pace = self._pace() if is_bulk and self.bounded and self._slack is None else None
        if pace is not None:
            bounded = tuple(self.bounded.values())
            self._slack = Slack(
                bounded, self.keys, self._lengths, self._kv.config, pace, self._now()
            )
        return is_bulk and self._slack is not None and self._slack.is_too_small_for(sequence)

    def _fits(self, sequence: Sequence) -> bool:
        num_tokens, num_available = self.tokens_to_reserve(sequence), self._kv.num_available
        if not self._kv.fits_into(sequence, num_tokens, num_available):
            return False
        if self._headroom is None:
            self._headroom = self._policy.admission.headroom(
                self.running, self._kv.config, self._lengths, self._preemption_iterations
            )
        headroom = self._headroom.pages(sequence, self._next_waiting)
        if not headroom:
            return True
        return self._kv.fits_into(sequence, num_tokens, num_available - headroom)

    def _next_waiting(self) -> list[Sequence]:
        return [*itertools.islice(self.waiting.ready(), MAX_ADMITTED)]

    def _preemption_iterations(self) -> float | None:
        seconds, pace = preempt_all_s(self._kv.config, self._kv.swap_costs), self._pace()
        return None if seconds is None or pace is None else seconds / max(pace.decode_s, 1e-9)

    def _least_pages(self, sequence: Sequence) -> int:
        return self._kv.least_missing(sequence, self.tokens_to_reserve(sequence))

    def wait(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        self.waiting.add(sequence)

    def admit(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Move a sequence that is `first_admissible` into a slot; return the pages of `begin`."""
        num_tokens = self.tokens_to_reserve(sequence)
        entries = self._kv.begin(sequence, num_tokens, is_first=not self.running)
        self.waiting.admit(sequence)
        if self._headroom is not None:
            self._headroom.admitted(sequence)
        sequence.slot = self.slots[0].take()
        sequence.phase = Phase.RUNNING
        if sequence.times.admitted_s is None:
            sequence.times.admitted_s = self._now()
        bisect.insort(self.running, sequence, key=self.keys.of)
        if sequence.request.has_bounds:
            self.bounded[sequence.key] = sequence
        return entries

    def preempt(self, sequence: Sequence, *, has_outgrown: bool = False) -> None:
        """Move a running sequence back to the waiting pool; it keeps its tokens."""
        self.leave_slot(sequence)
        self._kv.preempt(sequence, has_outgrown=has_outgrown)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.wait(sequence)

    def close(self, sequence: Sequence) -> None:
        """Free slot and pages of a sequence whose last token is planned."""
        self.leave_slot(sequence)
        sequence.phase = Phase.CLOSING
        self._kv.release(sequence)

    def leave_slot(self, sequence: Sequence) -> None:
        """Free a running sequence's slot; the caller sets its next phase."""
        self.running.remove(sequence)
        self._headroom = None
        self.bounded.pop(sequence.key, None)
        self._release_slot(sequence)

    def arrive(self, sequence: Sequence, group: int) -> None:
        """Move a running sequence to another group's slots, after the copy of its KV."""
        self._release_slot(sequence)
        self._kv.handed_over(sequence, group)
        sequence.slot = self.slots[group].take()
        self._arrived[group].append(sequence)

    def _release_slot(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        group = sequence.kv.group
        self.slots[group].release(sequence.slot)
        self._released[group].append(sequence.slot)
        if sequence in self._arrived[group]:
            self._arrived[group].remove(sequence)
        sequence.slot = None

    def compact(self, group: int) -> tuple[tuple[int, int], ...]:
        """Bring a group's live slots together; return (from, to) moves.

        A sequence that has just arrived is admitted where it is now, and needs no move.
        """
        moves = self.slots[group].compact()
        if moves:
            targets = dict(moves)
            for sequence in self.running:
                if sequence.kv.group == group and sequence.slot in targets:
                    sequence.slot = targets[sequence.slot]
        arrived = {sequence.slot for sequence in self._arrived[group]}
        return tuple(move for move in moves if move[1] not in arrived)

    def take_released(self, group: int) -> tuple[int, ...]:
        released, self._released[group] = self._released[group], []
        return tuple(released)

    def take_arrived(self, group: int) -> list[Sequence]:
        """Return the sequences that a handover brought to a group since the last call."""
        arrived, self._arrived[group] = self._arrived[group], []
        return arrived

    def extended(self, sequence: Sequence, start: int) -> None:
        """Send a running sequence's tokens from `start` on to its slot with the next step."""
        if sequence.slot is not None:
            self._extended[sequence.kv.group].append((sequence, start))

    def take_extensions(self, group: int) -> tuple[Extension, ...]:
        """Return the tokens that slots of a group got since the last call.

        A sequence that left its slot meanwhile is admitted elsewhere with all of its tokens.
        """
        extended, self._extended[group] = self._extended[group], []
        return tuple(
            Extension(sequence.slot, start, sequence.known_from(start))
            for sequence, start in extended
            if sequence.slot is not None and sequence.kv.group == group
        )

    def check_integrity(self) -> None:
        taken = [(sequence.kv.group, sequence.slot) for sequence in self.running]
        num_live = sum(slots.num_live for slots in self.slots)
        assert len(set(taken)) == len(taken) == num_live, "slots do not add up"
        assert all(each.phase is Phase.RUNNING for each in self.running), "one does not run"
        assert all(each.phase is Phase.WAITING for each in self.waiting), "one does not wait"
        begun = {each.key for each in self.waiting if each.times.admitted_s is not None}
        assert {each.key for each in self.waiting.begun} == begun, "others have begun"


def admission(sequence: Sequence) -> Admission:
    assert sequence.slot is not None
    return Admission(
        slot=sequence.slot,
        request=sequence.request,
        sample_index=sequence.sample_index,
        tokens=sequence.known_array,
        max_length=sequence.max_length,
    )


def handover(sequence: Sequence, target: int) -> Handover:
    """Return the handover of a sequence's KV to another group, in flight from now on."""
    sequence.num_in_flight += 1
    kv = sequence.kv
    pages = kv.table.pages[: kv.table.pages_for(kv.num_computed)]
    return Handover(sequence.key, kv.group, target, pages)
