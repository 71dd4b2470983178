"""The prefix cache: pages that sequences leave when they go, and find when they begin."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import final

from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request, padded_to_pages
from jaxserve.memory.cached_page import Branch, CachedPage, PageKeys
from jaxserve.memory.eviction import PageValues
from jaxserve.memory.grouped_table import GroupedPageTable, TableSizes
from jaxserve.memory.page_cache import PageCache
from jaxserve.memory.page_pool import NULL_PAGE, PageTable
from jaxserve.memory.prefetch import Prefetch
from jaxserve.memory.retrieval import Retrieval
from jaxserve.memory.snapshots import (
    Prefix,
    Snapshot,
    SnapshotCache,
    SnapshotKind,
    StateCopy,
    StateOnDisk,
)
from jaxserve.scheduling.kv.holds import Holds
from jaxserve.scheduling.sequence import (
    MAX_LOOKED_AT,
    Phase,
    Sequence,
    SequenceKV,
    SharedPages,
    Window,
)


@final
class PrefixCacheManager:
    """Matches sequences with the page cache, by their tokens.

    Unless it `keeps_pages`, nothing is cached; the samples of one request then still share its
    prompt. The counters are of tokens in full pages of admitted sequences: those looked up
    (queried), found (hit, also by tier), and evicted recently.

    With page groups (`sizes`), a sequence begins with a whole prefix or with none of it: all of its
    pages in the tables without a window, and those that the next token sees in the other tables.
    The pages of an index are in the cache under one key for each table.

    With `snapshots`, for a model with states in slots, a sequence begins with a snapshot and all
    pages before it, or with nothing. The pages of a prefix without a snapshot are of no use, except
    that a second sequence which begins with them takes a snapshot at their end.
    """

    def __init__(
        self,
        cache: PageCache,
        values: PageValues,
        retrieval: Retrieval,
        *,
        page_size: int,
        sizes: TableSizes | None,
        snapshots: SnapshotCache | None,
        keeps_pages: bool,
        holds: Holds | None,
        now: Callable[[], float],
    ):
        self._snapshots = snapshots
        # Sequences with a row in the next plan at whose end a snapshot is taken.
        self._reaching: list[tuple[Sequence, SnapshotKind]] = []
        self._sizes = sizes
        self._num_tables = 1 if sizes is None else sizes.num_tables
        self.num_queried = 0
        self.num_hit = 0
        self.num_hit_on_host = 0
        self.num_hit_on_disk = 0
        self.num_evicted = 0
        self._cache = cache
        self._retrieval = retrieval
        self._reuse = values.reuse
        self._prefetch = Prefetch(cache, values)
        self._page_size = page_size
        self._keeps = keeps_pages
        self._holds = holds
        self._now = now

    @property
    def num_prefetched(self) -> int:
        return self._prefetch.num_pages

    def num_held_for_others(self, sequence: Sequence) -> int:
        return 0 if self._holds is None else self._holds.num_held_for_others(sequence)

    # ---- sequences that begin ----

    def new(self, request: Request) -> SequenceKV:
        if self._holds is not None:
            self._holds.arrive(request)
        adapter = b"" if request.adapter is None else request.adapter.identity
        keys = PageKeys(request.encoder_prompt, adapter)
        prompt = request.prompt_array  # the request keeps it, so that no step has to make it
        if self._keeps:  # nor the keys
            keys.of(prompt, self._page_size, self._cache.identity)
        if self._sizes is not None:
            return SequenceKV(GroupedPageTable(self._cache.pool, self._sizes), keys=keys)
        grid = None if self._snapshots is None else self._snapshots.retention.grid_tokens
        table = PageTable(self._cache.pool, self._page_size)
        return SequenceKV(table, keys=keys, grid_tokens=grid)

    def most_shared(self, sequence: Sequence) -> int:
        if sequence.kv.host_pages or (self._keeps and sequence.needs_whole_prompt):
            return 0
        if self._keeps:
            return self._num_numbers(self._num_to_find(sequence))
        if sequence.primary is None:
            return 0
        return self._num_numbers(num_shareable(sequence, self._page_size))

    def _num_numbers(self, num_pages: int) -> int:
        """Return the pages that a sequence shares that begins with `num_pages` pages."""
        return num_pages if self._sizes is None else self._sizes.num_seen(num_pages)

    def shares(self, sequence: Sequence, num_pages: int) -> bool:
        """Whether other sequences own at least `num_pages` pages of a waiting one.

        The lookup is repeated only when enough pages have become owned since.
        """
        pool, kv = self._cache.pool, sequence.kv
        if num_pages > min(self.most_shared(sequence), pool.num_owned):
            return False
        if not self._keeps:
            return len(self._pages_of_primary(sequence)) >= num_pages
        if self._needs_prefix:  # one more page may complete a long prefix
            return self._num_owned(sequence) >= num_pages
        num_keys = self._num_to_find(sequence)
        found = kv.shared
        if found is not None and found.num_keys == num_keys and not sequence.request.num_encoded:
            if found.num_pages + pool.num_gained - found.num_gained < num_pages:
                return False
        count = self._num_owned(sequence)
        kv.shared = SharedPages(num_keys, count, pool.num_gained)
        return count >= num_pages

    @property
    def _needs_prefix(self) -> bool:
        """Whether sequences begin with whole prefixes only, so that the middle has no holes."""
        return self._sizes is not None or self._snapshots is not None

    def _num_owned(self, sequence: Sequence) -> int:
        pages = [cached.device_page for cached in self._find(sequence)]
        return sum(page is not None and self._cache.pool.refcount(page) > 0 for page in pages)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError if `shares` stores too few pages of a waiting sequence."""
        for sequence in sequences:
            found = sequence.kv.shared
            if sequence.phase is not Phase.WAITING or found is None or not self._keeps:
                continue
            if found.num_keys == self._num_to_find(sequence) and not sequence.request.num_encoded:
                most = found.num_pages + self._cache.pool.num_gained - found.num_gained
                assert self._num_owned(sequence) <= most, "more pages are shared than remembered"

    def awaits_disk(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence waits for pages, or a state, of the disk; requests them."""
        if self._cache.disk is None or not self._keeps or sequence.needs_whole_prompt:
            return False
        keys, state = self._keys_to_find(sequence), None
        if self._snapshots is not None and not self._retrieval.is_missing(sequence.key):
            keys, state = self._up_to_state(sequence, keys, self._snapshots)
        return self._retrieval.awaits(sequence.key, keys, state)

    def _up_to_state(
        self, sequence: Sequence, keys: Seq[bytes], snapshots: SnapshotCache
    ) -> tuple[Seq[bytes], StateOnDisk | None]:
        """Return the keys of the pages before the last state on any tier, and it if on the disk.

        All of these pages are on some tier, and those on the disk fit on the host; else none is
        returned.
        """
        tiers = [*itertools.takewhile(lambda x: x != "nowhere", map(self._cache.tier_of, keys))]
        tokens = sequence.known_tokens[: sequence.num_known - 1]
        prefix = (sequence.kv.keys.root, *keys[: len(tiers)]), tokens
        kept, state = snapshots.find(prefix), snapshots.find_on_disk(prefix)
        position = 0 if kept is None else kept.position
        if state is not None and len(state.prefix[1]) > position:
            position = len(state.prefix[1])
        else:
            state = None
        num_pages = position // self._page_size
        if tiers[:num_pages].count("disk") > self._cache.max_host_pages:
            return (), None
        return keys[:num_pages], state

    def prefetch(self, waiting: Iterable[Sequence]) -> None:
        """Bring pages of waiting sequences, in order, with the next, otherwise complete plan.

        The conversations of these sequences are active, so their pages are worth more than any
        other. Of a prompt with more than `MAX_LOOKED_AT` pages, one plan considers that many, so
        that its length does not slow down every plan.
        """
        if not self._cache.num_host_pages:
            return
        awaited: dict[CachedPage, Sequence] = {}
        long: dict[Branch, int] = {}
        for sequence in waiting:
            if self._num_numbers(self._num_to_find(sequence)) <= MAX_LOOKED_AT:
                cached = self._find(sequence)
                if any(page.device_page is None for page in cached):
                    self._continue(cached)
            elif self._needs_prefix:  # it comes at its admission
                continue
            else:
                cached = self._find_some(sequence)
                window = sequence.kv.window
                if window is not None and window.branch is not None:
                    long[window.branch] = window.num_copied_elsewhere
            for page in cached:
                awaited.setdefault(page, sequence)
        for page in self._prefetch.bring(list(awaited), long):
            awaited[page].kv.prefetched.add(page.index)

    def _find_some(self, sequence: Sequence) -> list[CachedPage]:
        """Return the cached pages in a long prompt's window; mark its conversation active."""
        if not self._keeps or sequence.needs_whole_prompt:
            return []
        num_pages = self._num_to_find(sequence)
        window = sequence.kv.window = sequence.kv.window or Window()
        stop = min(window.start + MAX_LOOKED_AT, num_pages)
        cached = self._cache.find(self._keys(sequence, window.start, stop))
        cached = _with_whole_prompt(sequence, cached, self._page_size)
        branch = window.branch
        if all(page.device_page is not None for page in cached):
            window.move(self._prefetch.num_copied(cached), num_pages)
        elif branch is None or branch.tip is None or branch.is_running or not branch.counts:
            window.belong_to(self._continue(self._find(sequence)))  # once for most sequences
        else:
            branch.begin([*cached, branch.tip], self._now())
        return cached

    def begin(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
        """Reserve `num_tokens` tokens for a sequence, and begin with its cached pages.

        Return (index, page) of the pages it begins with; None if the pool has too few.
        """
        loaded = self._retrieval.release(sequence.key)
        kv = sequence.kv
        cached = self._find(sequence)
        shared = {c.index: c.device_page for c in cached if c.device_page is not None}
        if not self._keeps:
            shared = self._pages_of_primary(sequence)
        newest = max([*shared, *(page.index for page in cached)], default=-1)
        num_pages = 1 + newest // self._num_tables
        leading, snapshot = self._find_with_state(sequence)
        kv.branch_point = self._branch_point(sequence, leading, snapshot)
        if snapshot is not None and snapshot.tail:
            num_pages += 1
        if self._needs_prefix:
            self._cache.hold_on_host(set(cached))
        has_begun = kv.table.begin(num_tokens, shared, num_pages)
        self._cache.hold_on_host(())
        if not has_begun:
            return None
        numbers, came = set(shared), kv.prefetched & shared.keys()
        for page in cached:
            # Not those that were evicted just now, to free the pages to begin with.
            if page.device_page is None and page.host_page is not None:
                self._cache.restore(page, kv.table.page(page.index))
                numbers.add(page.index)
                came.add(page.index)
        found = numbers if self._sizes is None else set(range(num_pages))
        kv.prefetched.clear()
        kv.window = None
        encoded = range(sequence.request.num_encoded // self._page_size)
        if not found.issuperset(encoded):
            found.difference_update(encoded)  # it is computed as a whole, to the same values
        kv.begin_with(found, self._page_size)
        if snapshot is not None and self._snapshots is not None:
            self._snapshots.restore(snapshot)
            kv.restores, kv.num_computed = snapshot, snapshot.position
        kv.is_mixed = False
        if self._keeps:
            self.num_hit_on_disk += len(came & loaded) * self._page_size
            on_host = {number // self._num_tables for number in came - loaded}
            self._count(sequence, len(found), len(on_host), len(came))
            if not sequence.num_preemptions:
                # Tokens that a grammar forces may follow the prompt in the same page.
                num_found = max(len(found) * self._page_size, kv.num_computed)
                kv.num_found = min(num_found, sequence.prompt_length)
            kv.branch = self._continue(cached)
            kv.branch.run()
            if self._holds is not None:
                self._holds.begin(sequence)
        return kv.table.entries()

    def _find(self, sequence: Sequence) -> list[CachedPage]:
        if not self._keeps or sequence.needs_whole_prompt:
            return []
        if self._sizes is not None:
            return self._find_prefix(self._keys_to_find(sequence), self._sizes)
        if self._snapshots is not None:
            leading, snapshot = self._find_with_state(sequence)
            return leading[: 0 if snapshot is None else snapshot.position // self._page_size]
        cached = self._cache.find(self._keys_to_find(sequence))
        return _with_whole_prompt(sequence, cached, self._page_size)

    def _find_with_state(self, sequence: Sequence) -> tuple[list[CachedPage], Snapshot | None]:
        """Return the leading cached pages, and the snapshot of the most tokens up to their end.

        The tokens after the last full page count, too.
        """
        if self._snapshots is None or sequence.needs_whole_prompt:
            return [], None
        keys = self._keys_to_find(sequence)
        leading = self._cache.find_leading(keys)
        tokens = sequence.known_tokens[: sequence.num_known - 1]
        page_keys = [sequence.kv.keys.root, *keys[: len(leading)]]
        return leading, self._snapshots.find((page_keys, tokens))

    def _branch_point(
        self, sequence: Sequence, leading: Seq[CachedPage], snapshot: Snapshot | None
    ) -> int:
        """Return where the leading pages end that are cached after a snapshot; 0 without any.

        No prompt parts there from others if all of these ended there, and this one goes on.
        """
        if self._snapshots is None or "branch" not in self._snapshots.retention.kinds:
            return 0
        end = len(leading) * self._page_size
        if end <= (0 if snapshot is None else snapshot.position):
            return 0
        last = leading[-1]
        have_ended = not any(
            each.is_running or (each.tip is not None and each.tip.index > last.index)
            for each in last.branches
        )
        return 0 if have_ended and len(leading) < self._num_to_find(sequence) else end

    def _prefix_of(self, sequence: Sequence, position: int) -> Prefix:
        keys = self._keys(sequence, 0, position // self._page_size)
        return (sequence.kv.keys.root, *keys), sequence.known_tokens[:position]

    def _find_prefix(self, keys: Seq[bytes], sizes: TableSizes) -> list[CachedPage]:
        """Return the pages of the longest prefix that all groups have, by number."""
        pages: dict[int, CachedPage] = {}
        stop = len(keys)
        for table in sizes.whole:
            leading = self._cache.find_leading([key_in(key, table) for key in keys[:stop]])
            stop = len(leading)
            pages.update(zip(range(table, sys.maxsize, sizes.num_tables), leading, strict=False))

        def has(index: int, num_pages: int) -> bool:
            for table in sizes.tables_seen(index, num_pages)[len(sizes.whole) :]:
                number = index * sizes.num_tables + table
                found = () if number in pages else self._cache.find([key_in(keys[index], table)])
                pages.update((number, page) for page in found)
                if number not in pages:
                    return False
            return True

        while stop:
            # A shorter prefix needs the page at `missing`, too, unless it ends there.
            seen = range(stop - 1, sizes.first_seen(stop) - 1, -1)
            missing = next((index for index in seen if not has(index, stop)), None)
            if missing is None:
                break
            stop = missing
        return [pages[number] for number in sizes.numbers_seen(stop)]

    def _keys_to_find(self, sequence: Sequence) -> Seq[bytes]:
        """Leave out the last token: it is always computed, because sampling needs its logits."""
        return self._keys(sequence, 0, self._num_to_find(sequence))

    def _num_to_find(self, sequence: Sequence) -> int:
        return (sequence.num_known - 1) // self._page_size

    def _pages_of_primary(self, sequence: Sequence) -> dict[int, int]:
        primary = sequence.primary
        if primary is None or primary.phase is not Phase.RUNNING or primary.kv.is_mixed:
            return {}
        table = primary.kv.table
        count = min(num_shareable(sequence, self._page_size), table.num_tokens // self._page_size)
        if self._sizes is None:
            return {index: table.page(index) for index in range(count)}
        shared = {number: table.page(number) for number in self._sizes.numbers_seen(count)}
        return {} if NULL_PAGE in shared.values() else shared

    def _count(self, sequence: Sequence, num_hit: int, num_on_host: int, num_below: int) -> None:
        """Count the tokens of a sequence that begins, and the pages that it found below the device.

        `num_below` counts pages of all tables, the other numbers count positions in pages.
        """
        keys, tables = self._keys_to_find(sequence), range(self._num_tables)
        self.num_queried += len(keys) * self._page_size
        self.num_hit += num_hit * self._page_size
        self.num_hit_on_host += num_on_host * self._page_size
        evicted = [
            self._cache.were_evicted([key_in(key, table) for key in keys]) for table in tables
        ]
        self.num_evicted += sum(map(any, zip(*evicted, strict=True))) * self._page_size
        if not sequence.num_preemptions:
            self._reuse.back(num_below + sum(map(sum, evicted)))

    def _continue(self, cached: Seq[CachedPage]) -> Branch:
        """Return the conversation whose tip is the last of the pages, or a new one; active now."""
        last = cached[-1] if cached else None
        branches = [] if last is None else last.branches
        ended_there = [each for each in branches if each.tip is last and not each.is_running]
        branch = ended_there[-1] if ended_there else Branch(self._now())
        branch.begin(cached, self._now())
        return branch

    # ---- while they run ----

    def computed(self, sequence: Sequence) -> None:
        """Cache the full pages of the prompt as far as a plan computes them."""
        if self._keeps and not sequence.kv.is_mixed:
            self._add(sequence, min(sequence.kv.num_computed, sequence.prompt_length))

    def _add(self, sequence: Sequence, num_tokens: int) -> None:
        kv = sequence.kv
        count = num_tokens // self._page_size
        if count <= kv.num_cached:
            return
        keys = self._keys(sequence, kv.num_cached, count)
        for index, key in enumerate(keys, kv.num_cached):
            self._add_pages(sequence, index, key)
        kv.num_cached = count

    def _add_pages(self, sequence: Sequence, index: int, key: bytes | None) -> list[CachedPage]:
        """Cache the pages at an index, in all tables that still have one."""
        branch = sequence.kv.branch
        assert branch is not None
        pages = []
        for table in range(self._num_tables):
            number = index * self._num_tables + table
            device_page = sequence.kv.table.page(number)
            if device_page == NULL_PAGE:
                continue
            page = self._cache.on_page(device_page)
            if page is None:
                own_key = None if key is None else key_in(key, table)
                page = self._cache.add(device_page, number, own_key, branch)
            if key is not None:
                branch.grow_to(page)
            pages.append(page)
        return pages

    # ---- sequences that go ----

    def has_computed(self, sequence: Sequence, end: int) -> None:
        """Take a snapshot after the next plan if it reaches a place where a state is kept."""
        if self._snapshots is None:
            return
        grid = sequence.kv.grid_tokens
        if grid is not None and end % grid == 0 and not sequence.falls_short:
            self._reaching.append((sequence, "grid"))
        elif end == sequence.kv.branch_point:
            self._reaching.append((sequence, "branch"))
        elif end == sequence.prompt_length and sequence.num_outputs_left:
            self._reaching.append((sequence, "prompt"))

    def save_reached(self) -> None:
        """Take snapshots with the plan after the next one, before its rows."""
        for sequence, kind in self._reaching:
            self._save(sequence, kind, sequence.kv.num_computed)
        self._reaching.clear()

    def save_state(self, sequence: Sequence, kind: SnapshotKind, *, has_ended: bool) -> None:
        """Take a snapshot of the state of a sequence that leaves its slot, with the next plan.

        Steps in flight deliver what was planned, or the answer ends with them: its state is then
        the one before its last token. `has_ended` says that it has, and that this was read.
        """
        kv = sequence.kv
        most = sequence.num_known - 1 if has_ended else kv.num_computed
        self._save(sequence, kind, min(kv.num_computed, most))

    def _save(self, sequence: Sequence, kind: SnapshotKind, position: int) -> None:
        """Copy a state with the next plan, unless it is kept; it is found once its tokens are."""
        kv, slot, snapshots = sequence.kv, sequence.slot, self._snapshots
        if snapshots is None or kind not in snapshots.retention.kinds:
            return
        if slot is None or kv.is_mixed or sequence.pooled is not None:
            return
        if kv.restores is not None or not position:  # nothing of it was planned yet
            return
        prefix = self._prefix_of(sequence, position) if position <= sequence.num_known else None
        if prefix is not None and snapshots.renew(prefix):
            return
        index, num_in_page = divmod(position, self._page_size)
        page = kv.table.page(index) if num_in_page else NULL_PAGE
        snapshot = snapshots.save(slot, page, position, kind)
        if snapshot is not None:
            kv.snapshots.append(snapshot)
            if prefix is not None:
                snapshots.name(snapshot, prefix)

    def _name_as_read(self, sequence: Sequence) -> None:
        """Set the tokens of snapshots; evict those that are not what was planned."""
        for snapshot in sequence.kv.snapshots:
            if self._snapshots is None or snapshot.page_keys:
                continue
            position = snapshot.position
            # Where it left its slot, which may be before what was planned.
            if sequence.phase is Phase.FINISHED or snapshot.kind == "preempted":
                position = min(position, sequence.num_known - 1)
            # The page after the full ones was copied, too.
            is_in_page = position // self._page_size == snapshot.position // self._page_size
            if is_in_page and position < sequence.num_known:
                self._snapshots.name(snapshot, self._prefix_of(sequence, position))
            else:
                self._snapshots.evict(snapshot)

    def forget_state(self, sequence: Sequence) -> None:
        """Evict the snapshots of a sequence whose tokens will not be read."""
        for snapshot in sequence.kv.snapshots:
            if self._snapshots is not None and not snapshot.page_keys:
                self._snapshots.evict(snapshot)

    def restores(self, admitted: Iterable[Sequence]) -> tuple[StateCopy, ...]:
        """Return the next plan's copies to the slots of the sequences that it admits."""
        copies: list[StateCopy] = []
        for sequence in admitted:
            kv, snapshot = sequence.kv, sequence.kv.restores
            if snapshot is None or self._snapshots is None:
                continue
            on_device, on_host = self._snapshots.entries_of(snapshot)
            entry = on_host if on_device is None else on_device
            assert sequence.slot is not None and entry is not None
            index, num_in_page = divmod(snapshot.position, self._page_size)
            page = kv.table.page(index) if num_in_page else NULL_PAGE
            copies.append(StateCopy(sequence.slot, page, entry, is_on_host=on_device is None))
            kv.restores = None
        return tuple(copies)

    def leave(self, sequence: Sequence, *, returns: bool = False) -> None:
        """Cache the full pages of a sequence whose table is closed next, unless it is mixed.

        Pages whose tokens are in flight have no key until `read`. `returns` says that the sequence
        continues later; conversations are expected to continue, too.
        """
        kv = sequence.kv
        if not self._keeps or not kv.table.num_pages:
            return
        if not kv.is_mixed:
            self._add_all(sequence)
        assert kv.branch is not None
        if self._holds is not None and not returns:
            pages = [self._cache.on_page(page) for page in kv.table.pages]
            self._holds.end(sequence, kv.branch, [page for page in pages if page is not None])
        returns = returns or sequence.request.conversation_id is not None
        kv.branch.rest(self._now(), returns=returns)
        self._cache.has_rested(kv.branch)
        kv.num_cached = 0

    def _add_all(self, sequence: Sequence) -> None:
        kv = sequence.kv
        # The newest token has no KV unless it was computed as a part of the prompt.
        known = max(sequence.prompt_length, sequence.num_known - 1)
        self._add(sequence, min(kv.num_computed, known))
        if sequence.num_in_flight and sequence.phase is not Phase.FINISHED:
            full = kv.num_computed // self._page_size
            for index in range(kv.num_cached, full):
                kv.unnamed += self._add_pages(sequence, index, None)

    def read(self, sequence: Sequence) -> None:
        """Set the keys of pages that a sequence left, as far as they are right."""
        kv = sequence.kv
        for page in kv.unnamed:
            index, table = divmod(page.index, self._num_tables)
            if (index + 1) * self._page_size < sequence.num_known:
                (key,) = self._keys(sequence, index, index + 1)
                self._cache.set_key(page, key_in(key, table))
            else:
                self._cache.evict(page)
        kv.unnamed.clear()
        self._name_as_read(sequence)

    def evict(self, sequence: Sequence) -> None:
        """Evict what a sequence has or left and no other owns: its KV and states are not right."""
        kv = sequence.kv
        for snapshot in kv.snapshots:
            assert self._snapshots is not None
            self._snapshots.evict(snapshot)
        for page in kv.unnamed:
            self._cache.evict(page)
        kv.unnamed.clear()
        for device_page in kv.table.pages:
            page = self._cache.on_page(device_page)
            if page is not None and self._cache.pool.refcount(device_page) == 1:
                self._cache.evict(page)
        if kv.branch is not None:
            kv.branch.rest()
        kv.num_cached = 0

    def _keys(self, sequence: Sequence, start: int, stop: int) -> Seq[bytes]:
        keys, identity = sequence.kv.keys, self._cache.identity
        known = keys.known(start, stop, identity)
        if known is not None:
            return known
        return keys.of(sequence.known_tokens, self._page_size, identity)[start:stop]


def key_in(key: bytes, table: int) -> bytes:
    """Return the key of a page in a table, from that of the tokens up to its end."""
    return key + bytes((table,)) if table else key


def _with_whole_prompt(
    sequence: Sequence, cached: list[CachedPage], page_size: int
) -> list[CachedPage]:
    """Return the cached pages; of an encoder's prompt all or none, since it is computed whole."""
    num_pages = sequence.request.num_encoded // page_size
    if sum(page.index < num_pages for page in cached) == num_pages:
        return cached
    return [page for page in cached if page.index >= num_pages]


def num_shareable(sequence: Sequence, page_size: int) -> int:
    """Return the full prompt pages that samples of one request share; at least one token stays."""
    return (sequence.prompt_length - 1) // page_size


def keys_of(tokens: Seq[int], config: EngineConfig, identity: bytes) -> Seq[bytes]:
    """Return the keys of the full pages of a context, or of an encoder's prompt."""
    if not config.has_encoder:
        return PageKeys().of(tokens, config.page_size, identity)
    padded = padded_to_pages(tokens, config.page_size)
    return PageKeys(tuple(tokens)).of(padded, config.page_size, identity)
