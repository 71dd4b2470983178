"""States of recurrent layers that are kept after their sequences have left their slots."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Protocol, TypeAlias, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.memory.cached_page import state_key, tail_length
from jaxserve.memory.disk_tier import DiskTier, HostMemory

# Where a snapshot was taken: at the end of an answer or of a prompt, where a sequence was
# preempted, where a prompt went another way than an earlier one, or at a multiple of some tokens.
SnapshotKind = Literal["end", "prompt", "preempted", "branch", "grid"]
# Uses that are counted one by one.
_MANY_USES = 2
# The least age, since values divide by it.
_MOMENT_S = 1e-3
# The most states of the host, the least recently used ones, that are compared for an eviction.
_MAX_COMPARED = 256


class StateCopy(NamedTuple):
    """A copy of a state between a slot and the entry of a snapshot.

    `page` is the page with the positions that follow the last full page; the null page if there are
    none. Its keys and values are copied with the state. The entry is one of the host's if
    `is_on_host`, which are only copied to slots.
    """

    slot: int
    page: int
    entry: int
    is_on_host: bool = False


class HostStateCopy(NamedTuple):
    """A copy of a snapshot from an entry of the device to one of the host, or back."""

    entry: int
    host_entry: int
    goes_out: bool


@final
@dataclass(eq=False, slots=True)
class Snapshot:
    """The state of a sequence after its first `position` tokens.

    Attributes:
      num_uses: sequences that have begun with it.
      page_keys: keys after 0, 1, 2, ... full pages before `position`; empty while some tokens have
        not been read.
      tail: the tokens after these pages.
      parent: the longest other snapshot of a beginning of the same tokens.
      children: snapshots of which this one is the parent.
    """

    position: int
    kind: SnapshotKind
    used_s: float
    num_uses: int = 0
    page_keys: Sequence[bytes] = ()
    tail: tuple[int, ...] = ()
    parent: Snapshot | None = field(default=None, repr=False)
    children: set[Snapshot] = field(default_factory=set, repr=False)

    @property
    def num_saved_tokens(self) -> int:
        """The tokens that its loss has computed again, since the parent is kept."""
        return self.position - (0 if self.parent is None else self.parent.position)

    def begins(self, other: Snapshot) -> bool:
        """Whether the other's tokens begin with these; False also if that is not known."""
        num_pages = len(self.page_keys) - 1
        if num_pages >= len(other.page_keys) or self.page_keys[-1] != other.page_keys[num_pages]:
            return False
        rest = other.tail if num_pages == len(other.page_keys) - 1 else ()
        return self.tail == rest[: len(self.tail)]


@final
class ReuseRates:
    """How often snapshots are used again, by their kind and the number of their uses so far.

    So the end of an answer is worth little once the conversation has gone on from there, and the
    end of a system prompt more with each use.
    """

    def __init__(self) -> None:
        self._reached: Counter[tuple[SnapshotKind, int]] = Counter()
        self._used: Counter[tuple[SnapshotKind, int]] = Counter()
        self._num_used, self._ages_s = 0, 0.0

    def begin(self, snapshot: Snapshot) -> None:
        self._reached[_state_of(snapshot)] += 1

    def use(self, snapshot: Snapshot, now_s: float) -> None:
        self._num_used += 1
        self._ages_s += now_s - snapshot.used_s
        snapshot.used_s = now_s
        self._used[_state_of(snapshot)] += 1
        snapshot.num_uses += 1
        self._reached[_state_of(snapshot)] += 1

    @property
    def mean_age_s(self) -> float:
        """The mean time from one use of a snapshot to the next; 0 before any."""
        return self._ages_s / max(1, self._num_used)

    def rate(self, snapshot: Snapshot) -> float:
        """Return the share that was used again of all that were like this one; 1/2 of none."""
        state = _state_of(snapshot)
        return (self._used[state] + 1) / (self._reached[state] + 2)


def _state_of(snapshot: Snapshot) -> tuple[SnapshotKind, int]:
    return snapshot.kind, min(snapshot.num_uses, _MANY_USES)


# ---- which states are kept ----


class StateRetention(Protocol):
    """Where states are copied, and which snapshot is evicted for another one.

    Attributes:
      kinds: the places at which a state is copied.
    """

    kinds: ClassVar[frozenset[SnapshotKind]]

    @property
    def grid_tokens(self) -> int | None:
        """States are copied after multiples of this many tokens; None for no grid."""
        ...

    def victim(self, kept: Sequence[Snapshot], now_s: float, rates: ReuseRates) -> Snapshot:
        """Return the one of at least one snapshot that is evicted."""
        ...


@final
@dataclass(frozen=True)
class LearnedReuse:
    """Keep the ends of prompts and answers, and where prompts part, by what a loss costs over time.

    A snapshot is worth the tokens that its loss has computed again, times the share of such
    snapshots that are used again, over the time since its last use; at least the mean time from one
    use to the next, so that what is new does not push out what will soon come back.
    """

    kinds: ClassVar[frozenset[SnapshotKind]] = frozenset(("end", "prompt", "preempted", "branch"))
    grid_tokens = None

    def victim(self, kept: Sequence[Snapshot], now_s: float, rates: ReuseRates) -> Snapshot:
        def value(snapshot: Snapshot) -> tuple[float, float]:
            saved = rates.rate(snapshot) * snapshot.num_saved_tokens
            return saved / max(_age_s(snapshot, now_s), rates.mean_age_s), snapshot.used_s

        return min(kept, key=value)


@final
@dataclass(frozen=True)
class Grid:
    """Keep a state every `grid_tokens` tokens, the most recently used ones (vLLM's `align`).

    A prompt is cut at the last multiple that a step reaches, and loops end at each of an answer.
    """

    grid_tokens: int = 512
    kinds: ClassVar[frozenset[SnapshotKind]] = frozenset(("grid", "preempted"))

    def __post_init__(self) -> None:
        if self.grid_tokens < 1:
            raise InvalidConfigError(
                f"grid_tokens={self.grid_tokens} is not allowed; pass at least 1"
            )

    def victim(self, kept: Sequence[Snapshot], now_s: float, rates: ReuseRates) -> Snapshot:
        return min(kept, key=lambda snapshot: snapshot.used_s)


@final
@dataclass(frozen=True)
class Marconi:
    """Keep branch points and the ends of answers, by recency and the work saved a byte.

    Marconi (Pan et al., arXiv:2411.19379), sections 4.1 to 4.3: the utility is the recency 1 / age
    plus `weight` times the work that a state saves beyond its parent, a byte of both; each is
    scaled to 0 to 1 over all candidates. A state with two children or more is not evicted.

    Assumed: work grows with the number of tokens alone; `weight` is given, where the paper replays
    requests to find it; keys and values stay in the page cache, under its own eviction; states of
    preempted sequences are kept, too.

    Attributes:
      state_tokens: the tokens whose keys and values take as many bytes as a state.
    """

    weight: float = 1.0
    state_tokens: float = 2048.0
    kinds: ClassVar[frozenset[SnapshotKind]] = frozenset(("end", "branch", "preempted"))
    grid_tokens = None

    def victim(self, kept: Sequence[Snapshot], now_s: float, rates: ReuseRates) -> Snapshot:
        some = [each for each in kept if len(each.children) < 2] or kept
        recency = _scaled([1 / _age_s(each, now_s) for each in some])
        saved = [each.num_saved_tokens for each in some]
        work = _scaled([num / (self.state_tokens + num) for num in saved])
        utility = [r + self.weight * w for r, w in zip(recency, work, strict=True)]
        return some[utility.index(min(utility))]


def _age_s(snapshot: Snapshot, now_s: float) -> float:
    return max(now_s - snapshot.used_s, _MOMENT_S)


def _scaled(values: Sequence[float]) -> list[float]:
    """Return the values on a line from 0 for the least to 1 for the largest; 1 if all are equal."""
    low, high = min(values), max(values)
    return [(each - low) / (high - low) if high > low else 1.0 for each in values]


# ---- the snapshots ----

# The keys after 0, 1, 2, ... full pages, and all tokens up to a position.
Prefix: TypeAlias = tuple[Sequence[bytes], Sequence[int]]


class StateOnDisk(NamedTuple):
    """The key of a state on the disk, and the tokens that it is after."""

    key: bytes
    prefix: Prefix


@final
class _Tier:
    """The entries of a pool: free ones, and those of snapshots, on the host by their last use."""

    def __init__(self, num_entries: int):
        self.num_entries = num_entries
        self.free = list(range(num_entries))
        self.held: dict[Snapshot, int] = {}

    def put(self, snapshot: Snapshot) -> int:
        entry = self.held[snapshot] = self.free.pop()
        return entry

    def drop(self, snapshot: Snapshot) -> bool:
        """Free the entry of a snapshot; return False if it has none."""
        entry = self.held.pop(snapshot, None)
        if entry is not None:
            self.free.append(entry)
        return entry is not None


@final
class SnapshotCache:
    """Finds snapshots by their tokens, and evicts those that a `StateRetention` names.

    A snapshot that is evicted from the device goes to the host, if there is room or one that is
    worth less. One on the host is copied into a slot from there; it also comes to the device if it
    is worth more than one there. Copies are collected for the next plan, which makes them in order.
    A snapshot that the next plan copies into a slot is not evicted before that plan is made. With a
    disk, what leaves the host is written there, whatever it is worth, and `load` brings it back.

    Args:
      num_entries: entries of the device's pool.
      num_host_entries: entries of the host's pool.
      disk: for snapshots that leave the host, which `host_memory` reads; None without one.

    Attributes:
      num_out, num_in: snapshots copied to the host, and from it.
    """

    def __init__(
        self,
        num_entries: int,
        page_size: int,
        retention: StateRetention,
        now: Callable[[], float],
        num_host_entries: int = 0,
        disk: DiskTier | None = None,
        host_memory: HostMemory | None = None,
    ):
        self.retention = retention
        self.num_saved = self.num_restored = self.num_out = self.num_in = 0
        self._page_size = page_size
        self._now = now
        self._rates = ReuseRates()
        self._device, self._host = _Tier(num_entries), _Tier(num_host_entries)
        self._by_key: dict[bytes, list[Snapshot]] = {}  # by the last of `page_keys`
        # The copies that the next plan makes before its other edits.
        self._copies: list[tuple[Snapshot, StateCopy | HostStateCopy]] = []
        self._locked: set[Snapshot] = set()
        # Those with copies in the newest plan, which may not be submitted yet.
        self._taken: set[Snapshot] = set()
        self._awaited: set[Snapshot] = set()
        self._disk = None if host_memory is None else disk
        self._host_memory = None if disk is None else host_memory

    @property
    def num_held(self) -> int:
        return len(self._device.held)

    @property
    def num_on_host(self) -> int:
        return len(self._host.held)

    @property
    def max_awaited(self) -> int:
        """The most states that sequences may await: others go through the rest of the host."""
        return max(1, self._host.num_entries // 2)

    def entries_of(self, snapshot: Snapshot) -> tuple[int | None, int | None]:
        """Return its entries on the device and on the host; None where it is not."""
        return self._device.held.get(snapshot), self._host.held.get(snapshot)

    def save(self, slot: int, page: int, position: int, kind: SnapshotKind) -> Snapshot | None:
        """Copy the state of a slot with the next plan; None if every entry is locked."""
        if not self._make_room():
            return None
        snapshot = Snapshot(position, kind, self._now())
        self._copies.append((snapshot, StateCopy(slot, page, self._device.put(snapshot))))
        self.num_saved += 1
        return snapshot

    def name(self, snapshot: Snapshot, prefix: Prefix) -> None:
        """Set the tokens of a snapshot, so that it is found; evict it if another has the same."""
        if not self._is_kept(snapshot):
            return
        if self.renew(prefix):
            self.evict(snapshot)
            return
        page_keys, tokens = prefix
        self._adopt(self.find(prefix), snapshot)
        snapshot.position, snapshot.page_keys = len(tokens), page_keys
        snapshot.tail = tuple(tokens[(len(page_keys) - 1) * self._page_size :])
        for other in itertools.chain(self._device.held, self._host.held):
            is_between = other.num_saved_tokens > other.position - snapshot.position > 0
            if is_between and snapshot.begins(other):
                self._adopt(snapshot, other)
        self._by_key.setdefault(page_keys[-1], []).append(snapshot)
        self._rates.begin(snapshot)

    def renew(self, prefix: Prefix) -> bool:
        """Return whether there is a snapshot of exactly these tokens, which counts as used now."""
        found = self.find(prefix)
        if found is None or found.position != len(prefix[1]):
            return False
        found.used_s = self._now()
        self._came_last(found)
        return True

    def find(self, prefix: Prefix) -> Snapshot | None:
        """Return the snapshot of the most tokens that a prefix begins with."""
        page_keys, tokens = prefix
        for num_pages in range(len(page_keys) - 1, -1, -1):
            start = num_pages * self._page_size
            found = [
                each
                for each in self._by_key.get(page_keys[num_pages], ())
                if each.tail == tuple(tokens[start : start + len(each.tail)])
            ]
            if found:
                return max(found, key=lambda each: each.position)
        return None

    def find_on_disk(self, prefix: Prefix) -> StateOnDisk | None:
        """Return the state on the disk of the most tokens that a prefix begins with."""
        if self._disk is None:
            return None
        page_keys, tokens = prefix
        for num_pages in range(len(page_keys) - 1, -1, -1):
            page_key, start = page_keys[num_pages], num_pages * self._page_size
            found = [
                key
                for key in self._disk.states_after(page_key)
                if key == state_key(page_key, tokens[start : start + tail_length(key)])
            ]
            if found:
                key = max(found, key=tail_length)
                position = start + tail_length(key)
                return StateOnDisk(key, (page_keys[: num_pages + 1], tokens[:position]))
        return None

    def load(self, prefix: Prefix, contents: bytes) -> Snapshot | None:
        """Put the state after these tokens, from the disk, on the host; None if there is no room.

        It stays there until `release`. All plans have been submitted.
        """
        self._taken.clear()
        if self.renew(prefix) or not self._make_room_on_host():
            return None
        assert self._host_memory is not None
        self._host_memory.write(self._host.free[-1], contents)  # may find no memory
        snapshot = Snapshot(len(prefix[1]), "end", self._now())
        self._host.put(snapshot)
        self._awaited.add(snapshot)
        self.name(snapshot, prefix)
        return snapshot

    def release(self, loaded: Iterable[Snapshot]) -> None:
        """Let snapshots leave the host that `load` has put there."""
        self._awaited.difference_update(loaded)

    def restore(self, snapshot: Snapshot) -> None:
        """Keep a snapshot until the next plan, which copies it into a slot."""
        self._rates.use(snapshot, self._now())
        self._came_last(snapshot)
        self.num_restored += 1
        self._locked.add(snapshot)
        if snapshot not in self._device.held:
            self.num_in += 1
            if self._make_room(snapshot):
                entry, host_entry = self._device.put(snapshot), self._host.held[snapshot]
                self._copies.append((snapshot, HostStateCopy(entry, host_entry, goes_out=False)))

    def evict(self, snapshot: Snapshot) -> None:
        """Evict a snapshot from the device and the host, with the copies of it to come."""
        self._leave(self._device, snapshot)
        self._leave(self._host, snapshot)

    def clear(self) -> None:
        for snapshot in [*self._device.held, *self._host.held]:
            self.evict(snapshot)
        self._locked.clear()

    def copy_out(self) -> None:
        """Copy snapshots to the host with the next plan, as far as it has free entries."""
        for snapshot in self._device.held:
            if snapshot.page_keys and snapshot not in self._host.held and self._host.free:
                self._copy_out(snapshot)

    def move_to_disk(self) -> None:
        """Move what plans have copied to the host to the disk, and free its entries."""
        copied = {each for each, _ in self._copies}
        for snapshot in [each for each in self._host.held if each not in copied]:
            self._write_to_disk(snapshot, waits=True)
            self.evict(snapshot)

    def close_host(self) -> None:
        """Use the host no longer, after `clear`."""
        self._host = _Tier(0)

    def drop_uncopied(self) -> None:
        """Evict what no plan has copied yet, before pages or slots change."""
        for snapshot in [each for each, _ in self._copies]:
            self.evict(snapshot)

    def take_copies(self) -> tuple[StateCopy | HostStateCopy, ...]:
        """Return the copies that the next plan makes before anything else; unlock all entries."""
        copies = tuple(copy for _, copy in self._copies)
        self._taken = {each for each, _ in self._copies}
        self._copies.clear()
        self._locked.clear()
        return copies

    def _adopt(self, parent: Snapshot | None, child: Snapshot) -> None:
        if child.parent is not None:
            child.parent.children.discard(child)
        child.parent = parent
        if parent is not None:
            parent.children.add(child)

    # ---- tiers ----

    def _make_room(self, coming: Snapshot | None = None) -> bool:
        """Free an entry of the device; for `coming`, only of a snapshot that is worth less."""
        kept = [each for each in self._device.held if each not in self._locked]
        if self._device.free or not kept:
            return bool(self._device.free)
        candidates = kept if coming is None else [*kept, coming]
        victim = self.retention.victim(candidates, self._now(), self._rates)
        if victim is coming:
            return False
        leaving = victim if self._disk is None else None
        if victim not in self._host.held and self._make_room_on_host(leaving):
            self._copy_out(victim)
        self._leave(self._device, victim)
        return True

    def _make_room_on_host(self, leaving: Snapshot | None = None) -> bool:
        """Free an entry of the host; for `leaving`, only of a snapshot that is worth less.

        A snapshot that is on the device, too, goes first. Others go to the disk, if their contents
        can be read now.
        """
        memory, busy = self._host_memory, self._locked
        if memory is not None:
            busy = busy.union(self._awaited, self._taken, (each for each, _ in self._copies))
        kept = [
            each
            for each, entry in itertools.islice(self._host.held.items(), _MAX_COMPARED)
            if each not in busy and (memory is None or memory.has_arrived(entry))
        ]
        if self._host.free or not kept:
            return bool(self._host.free)
        victim = next((each for each in kept if each in self._device.held), None)
        if victim is None:
            candidates = kept if leaving is None else [*kept, leaving]
            victim = self.retention.victim(candidates, self._now(), self._rates)
            if victim is leaving:
                return False
            self._write_to_disk(victim)
        self._leave(self._host, victim)
        return True

    def _write_to_disk(self, snapshot: Snapshot, *, waits: bool = False) -> None:
        if self._disk is None or self._host_memory is None or not snapshot.page_keys:
            return
        key = state_key(snapshot.page_keys[-1], snapshot.tail)
        if not self._disk.use(key):
            contents = self._host_memory.read(self._host.held[snapshot])
            self._disk.put(key, contents, waits=waits)

    def _copy_out(self, snapshot: Snapshot) -> None:
        entry, host_entry = self._device.held[snapshot], self._host.put(snapshot)
        self._copies.append((snapshot, HostStateCopy(entry, host_entry, goes_out=True)))
        self.num_out += 1

    def _is_kept(self, snapshot: Snapshot) -> bool:
        return snapshot in self._device.held or snapshot in self._host.held

    def _came_last(self, snapshot: Snapshot) -> None:
        if snapshot in self._host.held:
            self._host.held[snapshot] = self._host.held.pop(snapshot)

    def _leave(self, tier: _Tier, snapshot: Snapshot) -> None:
        """Evict a snapshot from one tier; drop its name and its copies if it is on no other."""
        if not tier.drop(snapshot) or self._is_kept(snapshot):
            return
        self._copies = [each for each in self._copies if each[0] is not snapshot]
        if snapshot.page_keys:
            others = self._by_key[snapshot.page_keys[-1]]
            others.remove(snapshot)
            if not others:
                del self._by_key[snapshot.page_keys[-1]]
        for child in list(snapshot.children):
            self._adopt(snapshot.parent, child)
        self._adopt(None, snapshot)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every entry is free or held, and every name is in place."""
        for tier in (self._device, self._host):
            entries = sorted([*tier.free, *tier.held.values()])
            assert entries == list(range(tier.num_entries)), "entries leaked"
        assert all(self._is_kept(each) for each, _ in self._copies), "a copy of an evicted snapshot"
        for snapshot in {*self._device.held, *self._host.held}:
            keys, parent = snapshot.page_keys, snapshot.parent
            named = self._by_key.get(keys[-1], ()) if keys else [snapshot]
            assert snapshot in named, "a snapshot is not found by its key"
            if parent is not None:
                assert self._is_kept(parent), "the parent was evicted"
                assert parent.begins(snapshot) or parent.tail, "the parent has other tokens"
                assert snapshot in parent.children and snapshot.num_saved_tokens > 0, "not a child"
            assert all(each.parent is snapshot for each in snapshot.children), "another's child"
        named = [each for some in self._by_key.values() for each in some]
        assert all(map(self._is_kept, named)), "an evicted snapshot is found"
        assert all(self._by_key.values()), "a key without snapshots"
