"""Waiting and running sequences and their slots, and the transitions between them."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, final

from jaxserve.core.config import bucket
from jaxserve.scheduling.kv.manager import KVManager, preempt_all_s
from jaxserve.scheduling.kv.prefix_cache import num_shareable
from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.order import OrderKeys
from jaxserve.scheduling.plan import Admission, Extension, Handover
from jaxserve.scheduling.policy import MAX_ADMITTED, Headroom, Policy, QueueView
from jaxserve.scheduling.sequence import Phase, Sequence
from jaxserve.scheduling.slack import Pace, Slack


def fewest_moves_window(live: Seq[bool], size: int) -> int:
    """Return the start of the window of `size` slots that already holds the most live ones.

    Moving the live slots outside of it into its holes then moves the fewest. O(n) by a sliding
    window, as Algorithm 3 of Flover (section V-D); unlike the listing there, the first window
    counts too. Ties go to the lowest start.
    """
    inside = sum(live[:size])
    best, best_start = inside, 0
    for start in range(1, len(live) - size + 1):
        inside += live[start + size - 1] - live[start - 1]
        if inside > best:
            best, best_start = inside, start
    return best_start


@final
class SlotTable:
    """Tracks which slots are live. A decode loop runs over a contiguous window of slots."""

    def __init__(self, num_slots: int, buckets: tuple[int, ...]):
        self._num_slots = num_slots
        # Bit i says whether slot i is live.
        self._live = 0
        self._buckets = buckets

    @property
    def num_live(self) -> int:
        return self._live.bit_count()

    def take(self) -> int:
        """Allocate the free slot that widens the live span least: a hole, else a neighbour."""
        low, high = self._span() or (0, 0)
        # The lowest free slot from the first live one on is a hole, or follows the last live one.
        slot = low + _lowest_bit(~(self._live >> low))
        if slot == high == self._num_slots:
            slot = low - 1
        self._live |= 1 << slot
        return slot

    def release(self, slot: int) -> None:
        if not self._live >> slot & 1:
            raise ValueError(f"slot {slot} is not live")
        self._live ^= 1 << slot

    def window(self, min_size: int = 0) -> tuple[int, int]:
        """Return (start, size) of the smallest compiled window over all live slots.

        It spans at least `min_size` slots, those before the live ones first.
        """
        low, high = self._span() or (0, 1)
        low = max(0, min(low, high - min_size))
        size = bucket(max(high - low, min_size), self._buckets)
        return min(low, self._num_slots - size), size

    def window_of_one(self, slot: int) -> tuple[int, int] | None:
        """Return (start, size) of the smallest compiled window with no live slot but `slot`."""
        size = self._buckets[0]
        window = (1 << size) - 1
        for start in range(max(0, slot - size + 1), min(slot, self._num_slots - size) + 1):
            if (self._live >> start & window).bit_count() == 1:
                return start, size
        return None

    def compact(self) -> list[tuple[int, int]]:
        """Move the live slots into the smallest window, if that is smaller; return (from, to)."""
        if not self._live:
            return []
        size = bucket(self.num_live, self._buckets)
        if size >= self.window()[1]:
            return []
        live = [bool(self._live >> slot & 1) for slot in range(self._num_slots)]
        start = fewest_moves_window(live, size)
        inside = range(start, start + size)
        holes = iter([slot for slot in inside if not live[slot]])
        strays = [slot for slot in range(self._num_slots) if live[slot] and slot not in inside]
        moves = [(stray, next(holes)) for stray in strays]
        for source, target in moves:
            self._live ^= 1 << source | 1 << target
        return moves

    def _span(self) -> tuple[int, int] | None:
        if not self._live:
            return None
        return _lowest_bit(self._live), self._live.bit_length()


def _lowest_bit(number: int) -> int:
    return (number & -number).bit_length() - 1


# The most entries of a block.
_MAX_ENTRIES = 128
# The least pages of a sequence whose tokens are in flight: they may change its reservation.
_UNKNOWN = -1


@final
@dataclass(eq=False, slots=True)
class _Entry:
    """A waiting sequence.

    `place` is its order key and its own key, so no two are equal; `num_passed` counts later
    sequences admitted before it, not counting its block's `num_passed`.
    """

    place: tuple[Any, int]
    sequence: Sequence
    least_pages: int
    num_passed: int = 0


@final
class _EntryBlock:
    """A run of entries in order; a search skips blocks of which no entry can be admitted now.

    `num_passed` counts passes of every entry; `least_pages` and `most_passed` are extremes of the
    entries' own values; `num_bounded` have a latency bound of their own.
    """

    __slots__ = ("entries", "least_pages", "most_passed", "num_bounded", "num_passed")

    def __init__(self, entries: list[_Entry], num_passed: int = 0):
        self.entries = entries
        self.num_passed = num_passed
        self.num_bounded = sum(entry.sequence.request.has_bounds for entry in entries)
        self.measure()

    def measure(self) -> None:
        self.least_pages = min(entry.least_pages for entry in self.entries)
        self.most_passed = max(entry.num_passed for entry in self.entries)

    def add(self, entry: _Entry) -> None:
        """Insert an entry whose `num_passed` counts all of its passes."""
        entry.num_passed -= self.num_passed
        bisect.insort(self.entries, entry, key=_place)
        self.least_pages = min(self.least_pages, entry.least_pages)
        self.most_passed = max(self.most_passed, entry.num_passed)
        self.num_bounded += entry.sequence.request.has_bounds

    def split(self) -> _EntryBlock:
        half = len(self.entries) // 2
        upper = _EntryBlock(self.entries[half:], self.num_passed)
        del self.entries[half:]
        self.num_bounded -= upper.num_bounded
        self.measure()
        return upper


@final
class WaitingPool:
    """Waiting sequences in the policy's order; a key is computed when a sequence begins to wait.

    A sequence that does not fit is passed by later ones as often as the order allows. The sequences
    are in blocks that know their least pages, so the cost of a search is the number of blocks and
    one of them, not the number of sequences. `least_pages` returns the fewest pages that a sequence
    can begin with; unless tokens are in flight, only `replace` and `sort` may change it while it
    waits.
    """

    def __init__(
        self,
        keys: OrderKeys,
        max_passes: int,
        page_size: int,
        least_pages: Callable[[Sequence], int],
    ):
        self._keys = keys
        self._max_passes = max_passes
        self._page_size = page_size
        self._least_pages = least_pages
        # None is empty.
        self._blocks: list[_EntryBlock] = []
        self._entries: dict[int, _Entry] = {}
        # Keys of sequences with a latency bound of their own.
        self._bounded: set[int] = set()
        # Sequences that ran before, by their keys.
        self._begun: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def has_bounded(self) -> bool:
        return bool(self._bounded)

    @property
    def begun(self) -> list[Sequence]:
        """Sequences that ran before, in no order."""
        return list(self._begun.values())

    def __iter__(self) -> Iterator[Sequence]:
        return iter([entry.sequence for block in self._blocks for entry in block.entries])

    def add(self, sequence: Sequence) -> None:
        self._add(self._new_entry(sequence))

    def remove(self, sequence: Sequence) -> None:
        self._remove(sequence)

    def replace(self, sequence: Sequence) -> None:
        """Recompute the key of a waiting sequence, because its answer or estimate changed."""
        num_passed = self._remove(sequence)
        self._add(self._new_entry(sequence, num_passed))

    def sort(self) -> None:
        """Recompute every key, because limits or estimates changed that the order uses."""
        self._set_sorted(
            self._new_entry(entry.sequence, block.num_passed + entry.num_passed)
            for block in self._blocks
            for entry in block.entries
        )

    def sort_by_service(self) -> None:
        """Recompute every key, because of what sequences have had; they need as much as before."""
        for block in self._blocks:
            for entry in block.entries:
                self._keys.take(entry.sequence)
                entry.place = self._keys.of(entry.sequence), entry.sequence.key
                entry.num_passed += block.num_passed
        self._set_sorted(entry for block in self._blocks for entry in block.entries)

    def _set_sorted(self, unsorted: Iterable[_Entry]) -> None:
        entries = sorted(unsorted, key=_place)
        size = _MAX_ENTRIES // 2
        self._blocks = [_EntryBlock(entries[i : i + size]) for i in range(0, len(entries), size)]

    def ready(self) -> Iterator[Sequence]:
        """Yield the sequences that could run at once if they fitted.

        A sequence whose tokens are still in flight ends the iteration, unless it may be passed.
        """
        for block in self._blocks:
            for entry in block.entries:
                if entry.sequence.num_in_flight:
                    if not self._may_be_passed(block, entry):
                        return
                elif not _waits_for_primary(entry.sequence, self._page_size):
                    yield entry.sequence

    def first_that(
        self,
        fits: Callable[[Sequence], bool],
        awaits: Callable[[Sequence], bool],
        num_available: int,
        *,
        only_bounded: bool = False,
    ) -> Sequence | None:
        """Return the first sequence that fits, if it may pass those before it.

        Args:
          fits: whether a sequence fits into `num_available` pages; called only for those that could
            by their least pages.
          awaits: whether a sequence fits but waits for something else; then any other may pass it.
          only_bounded: all without a latency bound of their own wait for something else. Once one
            of them has fitted, the search passes the rest without a look at their memory.
        """
        passes_unbounded = False
        for block in self._blocks:
            if passes_unbounded and not block.num_bounded:
                continue
            may_all_be_passed = block.num_passed + block.most_passed < self._max_passes
            if may_all_be_passed and block.least_pages > num_available:
                continue
            for entry in block.entries:
                sequence = entry.sequence
                is_passed = only_bounded and sequence.key not in self._bounded
                if is_passed and passes_unbounded:
                    continue
                if not sequence.num_in_flight:
                    if _waits_for_primary(sequence, self._page_size):
                        continue
                    if self._known_pages(block, entry) <= num_available and fits(sequence):
                        passes_unbounded = passes_unbounded or is_passed
                        if is_passed or awaits(sequence):
                            continue
                        return sequence
                if not (may_all_be_passed or self._may_be_passed(block, entry)):
                    return None
        return None

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence that runs from now on; those before it were passed."""
        if self._max_passes:
            at, index = self._find(self._entries[sequence.key])
            for block in self._blocks[:at]:
                block.num_passed += 1
            for entry in self._blocks[at].entries[:index]:
                entry.num_passed += 1
        self._remove(sequence)

    def _new_entry(self, sequence: Sequence, num_passed: int = 0) -> _Entry:
        self._keys.take(sequence)
        place = self._keys.of(sequence), sequence.key
        least_pages = _UNKNOWN if sequence.num_in_flight else self._least_pages(sequence)
        entry = self._entries[sequence.key] = _Entry(place, sequence, least_pages, num_passed)
        if sequence.request.has_bounds:
            self._bounded.add(sequence.key)
        if sequence.times.admitted_s is not None:
            self._begun[sequence.key] = sequence
        return entry

    def _known_pages(self, block: _EntryBlock, entry: _Entry) -> int:
        if entry.least_pages == _UNKNOWN:
            entry.least_pages = self._least_pages(entry.sequence)
            block.measure()
        return entry.least_pages

    def _add(self, entry: _Entry) -> None:
        if not self._blocks:
            self._blocks.append(_EntryBlock([entry]))
            return
        at = min(self._block_of(entry), len(self._blocks) - 1)
        block = self._blocks[at]
        block.add(entry)
        if len(block.entries) > _MAX_ENTRIES:
            self._blocks.insert(at + 1, block.split())

    def _remove(self, sequence: Sequence) -> int:
        entry = self._entries.pop(sequence.key)
        self._bounded.discard(sequence.key)
        self._begun.pop(sequence.key, None)
        at, index = self._find(entry)
        block = self._blocks[at]
        del block.entries[index]
        block.num_bounded -= entry.sequence.request.has_bounds
        if not block.entries:
            del self._blocks[at]
        elif self._max_passes:
            block.measure()
        return block.num_passed + entry.num_passed

    def _find(self, entry: _Entry) -> tuple[int, int]:
        at = self._block_of(entry)
        return at, bisect.bisect_left(self._blocks[at].entries, entry.place, key=_place)

    def _block_of(self, entry: _Entry) -> int:
        """Return the index of the first block that ends at or after the entry's place."""
        return bisect.bisect_left(self._blocks, entry.place, key=_last_place)

    def _may_be_passed(self, block: _EntryBlock, entry: _Entry) -> bool:
        return block.num_passed + entry.num_passed < self._max_passes


def _place(entry: _Entry) -> tuple[Any, int]:
    return entry.place


def _last_place(block: _EntryBlock) -> tuple[Any, int]:
    return block.entries[-1].place


def _waits_for_primary(sequence: Sequence, page_size: int) -> bool:
    primary = sequence.primary
    if primary is None or primary.phase in (Phase.CLOSING, Phase.FINISHED):
        return False
    shareable = num_shareable(sequence, page_size) * page_size
    return primary.phase is Phase.WAITING or primary.kv.num_computed < shareable


# Number of newest arrivals that count.
_NUM_RECENT = 16
# Mean times between arrivals after which none is expected any more.
_QUIET = 4.0
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

    def are_expected(self, now_s: float) -> bool:
        """Whether the last arrival is no longer ago than some mean times between arrivals."""
        if len(self._times_s) < 2:
            return False
        first_s, last_s = self._times_s[0], self._times_s[-1]
        return now_s - last_s < _QUIET * (last_s - first_s) / (len(self._times_s) - 1)


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
        view = QueueView(
            waiting=self.waiting,
            num_waiting=len(self.waiting),
            running=self.running,
            lengths=self._lengths,
            now_s=self._now(),
            expected_arrivals=self.expected_arrivals,
        )
        if self.keys.have_changed(view):
            for sequence in self.running:
                self.keys.take(sequence)
            self.running.sort(key=self.keys.of)
            self.waiting.sort_by_service()

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
        if self.running:  # else no answer would end, and no page would become free
            num_available -= self._kv.num_held_for_others(sequence)
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
        sequence.wait()
        self.waiting.add(sequence)

    def admit(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Move a sequence that is `first_admissible` into a slot; return the pages of `begin`."""
        num_tokens = self.tokens_to_reserve(sequence)
        entries = self._kv.begin(sequence, num_tokens, is_first=not self.running)
        self.waiting.admit(sequence)
        if self._headroom is not None:
            self._headroom.admitted(sequence)
        sequence.run(self.slots[0].take(), self._now())
        bisect.insort(self.running, sequence, key=self.keys.of)
        if sequence.request.has_bounds:
            self.bounded[sequence.key] = sequence
        return entries

    def preempt(self, sequence: Sequence, *, has_outgrown: bool = False) -> None:
        """Move a running sequence back to the waiting pool; it keeps its tokens."""
        self._kv.save_state(sequence, "preempted")
        self.leave_slot(sequence)
        self._kv.preempt(sequence, has_outgrown=has_outgrown)
        sequence.preempt()
        self.num_preemptions += 1
        self.waiting.add(sequence)

    def close(self, sequence: Sequence) -> None:
        """Free slot and pages of a sequence whose last token is planned."""
        self._kv.save_state(sequence, "end")
        self.leave_slot(sequence)
        sequence.close()
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
        sequence.move_to(self.slots[group].take())
        self._arrived[group].append(sequence)

    def _release_slot(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        group = sequence.kv.group
        self.slots[group].release(sequence.slot)
        self._released[group].append(sequence.slot)
        if sequence in self._arrived[group]:
            self._arrived[group].remove(sequence)
        sequence.move_to(None)

    def compact(self, group: int) -> tuple[tuple[int, int], ...]:
        """Bring a group's live slots together; return (from, to) moves.

        A sequence that has just arrived is admitted where it is now, and needs no move.
        """
        moves = self.slots[group].compact()
        if moves:
            targets = dict(moves)
            for sequence in self.running:
                if sequence.kv.group == group and sequence.slot in targets:
                    sequence.move_to(targets[sequence.slot])
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
    sequence.submitted()
    kv = sequence.kv
    pages = kv.table.pages[: kv.table.pages_for(kv.num_computed)]
    return Handover(sequence.key, kv.group, target, pages)
