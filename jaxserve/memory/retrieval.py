"""Reads pages and states from the disk to the host for the sequences that wait for them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from jaxserve.memory.cached_page import Branch
from jaxserve.memory.disk_tier import PATIENCE_S
from jaxserve.memory.page_cache import PageCache
from jaxserve.memory.snapshots import Prefix, Snapshot, SnapshotCache, StateOnDisk


@final
@dataclass(eq=False, slots=True)
class _Wanted:
    """The pages that one sequence has requested, and their `indices` in it, by key.

    So are its `states`, and the tokens before them. `unread` were not requested from the disk yet,
    `missing` have not arrived. `loaded` are indices of pages on the host, `snapshots` states there.
    """

    branch: Branch
    indices: dict[bytes, int] = field(default_factory=dict)
    states: dict[bytes, Prefix] = field(default_factory=dict)
    unread: deque[bytes] = field(default_factory=deque)
    missing: set[bytes] = field(default_factory=set)
    loaded: set[int] = field(default_factory=set)
    snapshots: set[Snapshot] = field(default_factory=set)


@final
class Retrieval:
    """Reads from the disk what sequences need before they begin; `take_in` puts it on the host.

    A sequence requests a page or a state once until `release`. Pages that are corrupt, or find no
    room on the host, count as arrived: they are recomputed. So are all pages while the disk hangs.

    Args:
      snapshots: takes the states; None for a model without any.
      on_arrival: called on the disk's thread when there is something for `take_in`.
    """

    def __init__(
        self,
        cache: PageCache,
        now: Callable[[], float],
        on_arrival: Callable[[], None],
        snapshots: SnapshotCache | None = None,
    ):
        self._cache = cache
        self._snapshots = snapshots
        self._now = now
        self._on_arrival = on_arrival
        # By the key of the sequence.
        self._wanted: dict[int, _Wanted] = {}
        # By the key of a page: the sequences that miss it.
        self._missed_by: defaultdict[bytes, list[_Wanted]] = defaultdict(list)
        # Sequences without room on the host, until another one frees its own.
        self._without_room: set[int] = set()
        # Keys that were requested from the disk and have not arrived.
        self._underway: set[bytes] = set()
        self._last_news_s = 0.0
        self._hangs = False
        # Whether sequences begin although the host has no room for what they need.
        self._lets_pass = False

    @property
    def has_arrived(self) -> bool:
        disk = self._cache.disk
        return disk is not None and disk.has_arrived

    @property
    def gives_up_s(self) -> float | None:
        """The time until which to wait for missing pages; None if none is missing."""
        if self._hangs or not any(wanted.missing for wanted in self._wanted.values()):
            return None
        return self._last_news_s + PATIENCE_S

    def is_missing(self, sequence: int) -> bool:
        """Whether something that a sequence has requested has not arrived."""
        own = self._wanted.get(sequence)
        return own is not None and bool(own.missing)

    def awaits(
        self, sequence: int, keys: Sequence[bytes], state: StateOnDisk | None = None
    ) -> bool:
        """Whether a sequence waits for the disk; requests a state, and pages on the disk alone.

        `keys` are those of its pages from the first on. If the host has no room for what it needs
        in addition to that of other sequences that have not begun, it is requested later, unless
        some has arrived before.
        """
        most = self._cache.max_host_pages
        if self._cache.disk is None or not most or self._hangs:
            return False
        if self.is_missing(sequence):
            return True
        own = self._wanted.get(sequence)
        if sequence in self._without_room:
            return own is None and not self._lets_pass
        asked, asked_states = ({}, {}) if own is None else (own.indices, own.states)
        on_disk = {
            key: index
            for index, key in enumerate(keys)
            if key not in asked and self._cache.tier_of(key) == "disk"
        }
        on_disk = dict(list(on_disk.items())[-most:])  # the later ones cost more
        states = {}
        if state is not None and state.key not in asked_states:
            states[state.key] = state.prefix
        wanted = (*on_disk, *states)
        if not wanted:
            return False
        if not self._has_room(sequence, len(on_disk), len(states)):
            # A sequence that has some of its pages begins with those: two sequences that wait for
            # each other's room would wait without end.
            self._without_room.add(sequence)
            return own is None and not self._lets_pass
        if own is None:
            own = self._wanted[sequence] = _Wanted(Branch(self._now(), is_awaited=True))
        own.indices.update(on_disk)
        own.states.update(states)
        own.unread.extend(wanted)
        own.missing.update(wanted)
        for key in wanted:
            self._missed_by[key].append(own)
        if not self._underway:
            self._last_news_s = self._now()
        self._ask_disk()
        return bool(own.missing)  # the disk's thread may have evicted them all just now

    def _has_room(self, sequence: int, num_pages: int, num_states: int) -> bool:
        """Whether the host holds these beside what the other sequences have requested."""
        others = [each for key, each in self._wanted.items() if key != sequence]
        if not others:
            return True
        num_pages += sum(len(each.indices) for each in others)
        num_states += sum(len(each.states) for each in others)
        most_states = 0 if self._snapshots is None else self._snapshots.max_awaited
        return num_pages <= self._cache.max_host_pages and num_states <= most_states

    def stop_waiting_for_host(self) -> bool:
        """Admit without host pages until the next admission; False if no sequence waits for them.

        For when nothing runs: sequences with all pages may wait for one that waits for their room.
        """
        self._lets_pass = bool(self._wanted) and self.gives_up_s is None
        return self._lets_pass

    def release(self, sequence: int) -> set[int]:
        """End the wait of a sequence; return the indices of the pages that were put on the host."""
        self._lets_pass = False
        self._without_room.discard(sequence)
        wanted = self._wanted.pop(sequence, None)
        if wanted is None:
            return set()
        self._without_room.clear()
        for key in wanted.missing:
            others = self._missed_by[key]
            others.remove(wanted)
            if not others:
                del self._missed_by[key]
        self._end_wait(wanted)
        return wanted.loaded

    def take_in(self) -> None:
        """Put what has arrived on the host, and give up on a disk that hangs."""
        if self._cache.disk is None:
            return
        for key, contents in self._cache.disk.arrived():
            self._hangs = False
            self._last_news_s = self._now()
            self._underway.discard(key)
            self._settle(key, contents)
        self._ask_disk()
        gives_up_s = self.gives_up_s
        if gives_up_s is not None and self._now() >= gives_up_s:
            self._hangs = True
            self.clear()

    def clear(self) -> None:
        """End the wait of every sequence; what arrives from now on is dropped."""
        for wanted in self._wanted.values():
            self._end_wait(wanted)
        self._wanted.clear()
        self._missed_by.clear()
        self._without_room.clear()

    def _end_wait(self, wanted: _Wanted) -> None:
        wanted.branch.arrived()
        if self._snapshots is not None:
            self._snapshots.release(wanted.snapshots)

    def _ask_disk(self) -> None:
        disk = self._cache.disk
        assert disk is not None
        for wanted in self._wanted.values():
            while wanted.unread:
                key = wanted.unread[0]
                if key not in self._underway:
                    if self._cache.tier_of(key) != "disk":
                        self._settle(key, None)
                    elif not disk.read(key, self._on_arrival):
                        return
                    else:
                        self._underway.add(key)
                wanted.unread.popleft()

    def _settle(self, key: bytes, contents: bytes | None) -> None:
        for wanted in self._missed_by.pop(key, ()):
            wanted.missing.discard(key)
            if contents is None:
                continue
            if key in wanted.states and self._snapshots is not None:
                snapshot = self._snapshots.load(wanted.states[key], contents)
                wanted.snapshots.update(() if snapshot is None else (snapshot,))
            elif self._cache.load(wanted.indices[key], key, contents, wanted.branch):
                wanted.loaded.add(wanted.indices[key])
