"""States of recurrent layers that are kept after their sequences have left their slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

# Where a snapshot was taken: at the end of an answer or of a prompt, where a sequence was
# preempted, or where a prompt went another way than an earlier one.
SnapshotKind = Literal["end", "prompt", "preempted", "branch"]
# Uses that are counted one by one.
_MANY_USES = 2


class StateCopy(NamedTuple):
    """A copy of a state between a slot and the entry of a snapshot.

    `page` is the page with the positions that follow the last full page; the null page if there are
    none. Its keys and values are copied with the state.
    """

    slot: int
    page: int
    entry: int


@final
@dataclass(eq=False, slots=True)
class Snapshot:
    """The state of a sequence after its first `position` tokens.

    Attributes:
      entry: where in the pool it is; None once it was evicted.
      num_uses: sequences that have begun with it.
      page_key: key of the full pages before `position`; None while some tokens have not been read.
      tail: the tokens after these pages.
    """

    entry: int | None
    position: int
    kind: SnapshotKind
    used_s: float
    num_uses: int = 0
    page_key: bytes | None = None
    tail: tuple[int, ...] = ()


@final
class ReuseRates:
    """How often snapshots are used again, by their kind and the number of their uses so far.

    So the end of an answer is worth little once the conversation has gone on from there, and the
    end of a system prompt more with each use.
    """

    def __init__(self) -> None:
        self._reached: Counter[tuple[SnapshotKind, int]] = Counter()
        self._used: Counter[tuple[SnapshotKind, int]] = Counter()

    def begin(self, snapshot: Snapshot) -> None:
        self._reached[_state_of(snapshot)] += 1

    def use(self, snapshot: Snapshot) -> None:
        self._used[_state_of(snapshot)] += 1
        snapshot.num_uses += 1
        self._reached[_state_of(snapshot)] += 1

    def rate(self, snapshot: Snapshot) -> float:
        """Return the share that was used again of all that were like this one; 1/2 of none."""
        state = _state_of(snapshot)
        return (self._used[state] + 1) / (self._reached[state] + 2)


def _state_of(snapshot: Snapshot) -> tuple[SnapshotKind, int]:
    return snapshot.kind, min(snapshot.num_uses, _MANY_USES)


@final
class SnapshotCache:
    """Finds snapshots by their tokens, and chooses which to evict.

    The least valuable is evicted first: the tokens that it saves, times the share of such snapshots
    that are used again, over the time since its last use.
    A snapshot that the next plan copies into a slot is not evicted before that plan is made.

    Args:
      num_entries: entries of the pool.
    """

    def __init__(self, num_entries: int, now: Callable[[], float]):
        self.num_entries = num_entries
        self.num_saved = self.num_restored = 0
        self._now = now
        self._rates = ReuseRates()
        self._free = list(range(num_entries))
        self._held: dict[int, Snapshot] = {}  # by entry
        self._by_key: dict[bytes, list[Snapshot]] = {}
        # The copies to entries that the next plan makes, by entry.
        self._saves: dict[int, StateCopy] = {}
        self._locked: set[int] = set()

    @property
    def num_held(self) -> int:
        return len(self._held)

    def save(self, slot: int, page: int, position: int, kind: SnapshotKind) -> Snapshot | None:
        """Copy the state of a slot with the next plan; None if every entry is locked."""
        if not self._free and not self._evict_one():
            return None
        entry = self._free.pop()
        snapshot = self._held[entry] = Snapshot(entry, position, kind, self._now())
        self._saves[entry] = StateCopy(slot, page, entry)
        self.num_saved += 1
        return snapshot

    def name(
        self, snapshot: Snapshot, position: int, page_key: bytes, tail: tuple[int, ...]
    ) -> None:
        """Set the tokens of a snapshot, so that it is found; evict it if another has the same."""
        if snapshot.entry is None:
            return
        others = self._by_key.setdefault(page_key, [])
        same = next((each for each in others if each.tail == tail), None)
        if same is not None:
            same.used_s = self._now()
            self.evict(snapshot)
            return
        snapshot.position, snapshot.page_key, snapshot.tail = position, page_key, tail
        others.append(snapshot)
        self._rates.begin(snapshot)

    def find(self, page_key: bytes, tokens: Sequence[int]) -> Snapshot | None:
        """Return the snapshot with the longest tail that `tokens` begin with, after these pages."""
        found = None
        for each in self._by_key.get(page_key, ()):
            length = len(each.tail)
            if (found is None or length > len(found.tail)) and each.tail == tuple(tokens[:length]):
                found = each
        return found

    def has_key(self, page_key: bytes) -> bool:
        return page_key in self._by_key

    def restore(self, snapshot: Snapshot) -> None:
        """Keep a snapshot until the next plan, which copies it into a slot."""
        assert snapshot.entry is not None
        snapshot.used_s = self._now()
        self._rates.use(snapshot)
        self.num_restored += 1
        self._locked.add(snapshot.entry)

    def evict(self, snapshot: Snapshot) -> None:
        if snapshot.entry is None:
            return
        self._free.append(snapshot.entry)
        self._saves.pop(snapshot.entry, None)
        del self._held[snapshot.entry]
        snapshot.entry = None
        if snapshot.page_key is not None:
            others = self._by_key[snapshot.page_key]
            others.remove(snapshot)
            if not others:
                del self._by_key[snapshot.page_key]

    def clear(self) -> None:
        for snapshot in list(self._held.values()):
            self.evict(snapshot)
        self._locked.clear()

    def drop_unsaved(self) -> None:
        """Evict what no plan has copied yet, before pages or slots change."""
        for entry in list(self._saves):
            self.evict(self._held[entry])

    def take_saves(self) -> tuple[StateCopy, ...]:
        """Return the copies that the next plan makes before anything else; unlock all entries."""
        saves = tuple(self._saves.values())
        self._saves.clear()
        self._locked.clear()
        return saves

    def _evict_one(self) -> bool:
        now_s = self._now()
        victims = (each for each in self._held.values() if each.entry not in self._locked)

        def value(snapshot: Snapshot) -> tuple[float, float]:
            age_s = max(now_s - snapshot.used_s, 1e-3)
            return self._rates.rate(snapshot) * snapshot.position / age_s, snapshot.used_s

        victim = min(victims, key=value, default=None)
        if victim is not None:
            self.evict(victim)
        return victim is not None

    def check_integrity(self) -> None:
        """Raise AssertionError unless every entry is free or held, and every name is in place."""
        assert sorted([*self._free, *self._held]) == list(range(self.num_entries)), "entries leaked"
        assert self._saves.keys() <= self._held.keys(), "a copy to an entry that is free"
        for entry, snapshot in self._held.items():
            assert snapshot.entry == entry, "a snapshot is in another entry"
            named = self._by_key.get(snapshot.page_key, ()) if snapshot.page_key else [snapshot]
            assert snapshot in named, "a snapshot is not found by its key"
        named = [each for some in self._by_key.values() for each in some]
        assert all(each.entry is not None for each in named), "an evicted snapshot is found"
        assert all(self._by_key.values()), "a key without snapshots"
