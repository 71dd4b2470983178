"""The one writer of page tables, tiers and reservations, and the costs of swaps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.memory.disk_tier import NO_DISK, DiskTier, DiskUsage, HostMemory
from jaxserve.memory.eviction import PageValues, RecomputeCost
from jaxserve.memory.grouped_table import GroupedPageTable, TableSizes
from jaxserve.memory.page_cache import TIERS, PageCache, Tier
from jaxserve.memory.page_pool import HostPool, Moves, PagePool, fewest_moves
from jaxserve.memory.retrieval import Retrieval
from jaxserve.memory.snapshots import SnapshotCache, SnapshotKind, StateCopy
from jaxserve.scheduling.kv.holds import Holds
from jaxserve.scheduling.kv.prefix_cache import PrefixCacheManager, key_in, keys_of
from jaxserve.scheduling.kv.transfer import PageTransfer, WeightsIdentity, WeightsName
from jaxserve.scheduling.plan import PageCopies, StateCopies
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.sequence import Phase, Sequence, SequenceKV

# Without measurements: attending to this many positions is as much work as the rest of a token.
_POSITIONS_A_TOKEN = 4096


@final
@dataclass(frozen=True, kw_only=True)
class SwapCosts:
    """Times measured on the device.

    Attributes:
      page_s: seconds to copy a page to the host, and again to copy it back.
      token_s: seconds to compute the KV of one prompt token.
      position_s: additional seconds for each position that the token attends to.
    """

    page_s: float
    token_s: float
    position_s: float = 0.0


def page_cost(config: EngineConfig, costs: SwapCosts | None) -> RecomputeCost:
    """Return the recompute cost of a page after a context; unmeasured, in units of one token.

    With page groups, or states in slots, all pages of a context cost the same: without one of them
    none is of use. With groups each has a part of the layers.
    """
    token_s = 1.0 if costs is None else costs.token_s
    position_s = token_s / _POSITIONS_A_TOKEN if costs is None else costs.position_s
    if config.page_layout.is_grouped or config.has_slot_state:
        position_s, token_s = 0.0, token_s / config.page_layout.num_tables
    return RecomputeCost.analytic(
        attention=config.page_size * position_s,
        other=config.page_size * token_s,
        longest=config.max_context,
    )


def preempt_all_s(config: EngineConfig, costs: SwapCosts | None) -> float | None:
    """Return the seconds to preempt a full pool and to bring it back; None without costs."""
    if costs is None:
        return None
    token_s = costs.token_s
    if config.num_host_pages:
        page_s = costs.page_s * config.page_layout.num_tables
        token_s = min(token_s, 2 * page_s / config.page_size)
    return config.pool_tokens * token_s


def copy_s(config: EngineConfig, costs: SwapCosts | None) -> float:
    """Return the seconds to copy a page to the host, if its value has to exceed them.

    It is 0 with states in slots: a state, with the bytes of many pages, is copied whatever it
    costs, and is of no use without all pages before it.
    """
    return 0.0 if costs is None or config.has_slot_state else costs.page_s


@final
class SwapSpace:
    """Chooses between swapping and recomputing, and allocates host pages for swapped sequences.

    Args:
      host: pages of the host; None to always recompute preempted sequences.
      costs: None if they were not measured. Swapping then counts as cheaper; it was, by orders of
        magnitude, on every device measured so far.
      max_pages: the most pages that one plan copies; a sequence with more than are left is
        recomputed.
    """

    def __init__(self, host: HostPool | None, costs: SwapCosts | None, max_pages: int):
        self._costs = costs
        self._max_pages = max_pages
        self.num_pages_out = 0
        self.num_pages_in = 0
        self.num_recomputed = 0
        self._host = host
        self._saved: list[tuple[Sequence, PageCopies]] = []

    @property
    def penalty_s(self) -> float:
        """Seconds of the device that preemptions took, by the measured costs; 0 without them."""
        if self._costs is None:
            return 0.0
        num_pages = self.num_pages_out + self.num_pages_in
        return num_pages * self._costs.page_s + self.num_recomputed * self._costs.token_s

    def decide_by(self, costs: SwapCosts | None) -> None:
        self._costs = costs

    def save(self, sequence: Sequence) -> None:
        """Swap out a sequence's pages with the next plan, or drop its KV; then they are freed."""
        kv = sequence.kv
        if kv.host_pages:  # it was admitted in this very step, and is still on the host
            return
        entries = kv.table.entries(kv.num_computed)
        host = self._host_for(kv.num_computed, len(entries))
        if host is None:
            kv.num_dropped = kv.num_computed
            kv.num_computed = 0
            return
        numbers, pages = zip(*entries, strict=True)
        host_pages = host.allocate(len(entries))
        kv.host_pages = dict(zip(numbers, host_pages, strict=True))
        self._saved.append((sequence, tuple(zip(pages, host_pages, strict=True))))

    def admitted(self, sequence: Sequence) -> None:
        """Count what a sequence lost at its preemption and did not find cached."""
        kv = sequence.kv
        num_found = sequence.planned_length - sequence.num_uncomputed
        self.num_recomputed += max(0, kv.num_dropped - num_found)
        kv.num_dropped = 0

    def drop(self, sequence: Sequence) -> None:
        """Free a sequence's host pages; if it has no slot, it is recomputed."""
        kv = sequence.kv
        if kv.host_pages and self._host is not None:
            self._host.free(kv.host_pages.values())
            kv.host_pages = {}
            kv.num_computed = 0

    def drop_unsaved(self) -> None:
        """Drop what no plan has copied yet, before device pages move."""
        for sequence, _ in self._saved:
            if sequence.kv.host_pages:
                sequence.kv.num_dropped = sequence.kv.num_computed
                self.drop(sequence)
        self._saved.clear()

    def copies_out(self) -> PageCopies:
        """Return (device page, host page) of the next plan, in the order of the copies."""
        copies = tuple(copy for _, each in self._saved for copy in each)
        self._saved.clear()
        self.num_pages_out += len(copies)
        return copies

    def copies_in(self, admitted: Iterable[Sequence]) -> PageCopies:
        """Return (host page, device page) of readmitted sequences, and free their host pages.

        Call it when the step preempts no more sequences.
        """
        copies: list[tuple[int, int]] = []
        for sequence in admitted:
            kv = sequence.kv
            if kv.host_pages and self._host is not None:
                copies += [
                    (kv.host_pages[number], page)
                    for number, page in kv.table.entries()
                    if number in kv.host_pages
                ]
                self._host.free(kv.host_pages.values())
                kv.host_pages = {}
        self.num_pages_in += len(copies)
        return tuple(copies)

    def _host_for(self, num_tokens: int, num_pages: int) -> HostPool | None:
        """Return the host's pool if it has room for these pages and copying pays, else None."""
        host = self._host
        num_leaving = sum(len(copies) for _, copies in self._saved)
        most = 0 if host is None else min(host.num_free, self._max_pages - num_leaving)
        if not 0 < num_pages <= most:
            return None
        if self._costs is None:
            return host
        pays = 2 * num_pages * self._costs.page_s <= num_tokens * self._costs.token_s
        return host if pays else None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PageUsage:
    """Counts of the pages of the device, the host and the disk.

    The null page is not usable. Reserved pages are not allocated yet; cached ones have no owner;
    available ones are free or cached, and not reserved.
    """

    num_usable: int
    num_owned: int
    num_reserved: int
    num_cached: int
    num_available: int
    num_host: int
    num_host_free: int
    disk: DiskUsage

    @classmethod
    def of(cls, pool: PagePool, host: HostPool, disk: DiskTier | None) -> PageUsage:
        return cls(
            num_usable=pool.num_usable,
            num_owned=pool.num_owned,
            num_reserved=pool.num_reserved,
            num_cached=pool.num_cached,
            num_available=pool.num_available,
            num_host=host.num_pages,
            num_host_free=host.num_free,
            disk=NO_DISK if disk is None else disk.usage,
        )


@final
class Growth:
    """The pages that running sequences need; all of their tokens but the next one are computed."""

    def __init__(self, sequences: Seq[Sequence], config: EngineConfig):
        self._page_size = config.page_size
        self._grouped = [each.kv for each in sequences] if config.page_layout.is_grouped else ()
        self._computed = np.asarray([each.kv.num_computed for each in sequences], np.int64)
        reserved = [each.kv.table.reservation for each in sequences]
        self._reserved = np.asarray(reserved, np.int64)

    def num_missing(self, num_tokens: int) -> int:
        """Return the pages that `num_tokens` more of each take beyond their reservations."""
        if self._grouped:
            return sum(kv.table.num_missing(kv.num_computed + num_tokens) for kv in self._grouped)
        pages = -(-(self._computed + num_tokens) // self._page_size)
        return int(np.maximum(pages - self._reserved, 0).sum())


@final
class Restoring:
    """Takes the copies from the host, a limited number with each plan.

    The other sequences of a step wait for its copies: 128k tokens of an 8B model are 16 GiB. So a
    sequence with more pages than one plan copies runs, with all of its pages, and computes nothing
    before the last of them has come.
    """

    def __init__(self, cache: PageCache):
        self._cache = cache
        self._sequences: list[Sequence] = []
        self._takes_all = False

    def __bool__(self) -> bool:
        return any(sequence.kv.awaits is not None for sequence in self._sequences)

    def begin(self, sequence: Sequence, most: int | None) -> None:
        """Let a sequence wait for its pages if no plan, of `most` copies, brings them all."""
        incoming = self._cache.incoming
        if most is None:
            self._takes_all = len(incoming) > 0
        elif len(incoming) > most:
            sequence.kv.awaits = self._cache.last_incoming(sequence.kv.table.pages)
            self._sequences.append(sequence)

    def copies(self, most: int) -> PageCopies:
        """Return the next plan's (host page, device page), at most `most` if others wait."""
        incoming = self._cache.incoming
        copies = incoming.take(None if self._takes_all else most)
        self._takes_all = False
        for sequence in self._sequences:
            awaited = sequence.kv.awaits
            if awaited is not None and awaited.device_page not in incoming:
                sequence.kv.awaits = None
        self._sequences = [each for each in self._sequences if each.kv.awaits is not None]
        return copies


@final
class KVManager:
    """Owns the KV state of every sequence: its pages, its reservation, and the tiers of its KV.

    A sequence begins (`begin`), grows (`reserve`, `allocate`, `computed`) and goes (`preempt`,
    `release`, `end`, `restart`). Copies between tiers are collected for the next plan.

    Args:
      config: sizes of the pools; the attribute has the present number of pages.
      policy: its retention and preemption say what is kept, and where.
      costs: of swapping and recomputing; None if they were not measured.
      disk: keeps what leaves the host, from former runs too; closed with the manager.
      host_memory, host_states: the contents of the host's pages, and of its states; needed with a
        disk.
      on_arrival: called on the disk's thread when `retrieval` has something to take in.
    """

    def __init__(
        self,
        config: EngineConfig,
        policy: Policy,
        now: Callable[[], float],
        *,
        costs: SwapCosts | None = None,
        disk: DiskTier | None = None,
        host_memory: HostMemory | None = None,
        host_states: HostMemory | None = None,
        on_arrival: Callable[[], None] = lambda: None,
    ):
        retention = policy.retention_for(config)
        self.config = config
        self._sizes = None
        if config.page_layout.is_grouped:
            self._sizes = TableSizes(
                config.page_layout,
                config.page_size,
                prompt_stride=config.prompt_stride,
                answer_stride=config.answer_stride,
            )
        self.num_outgrown = 0
        self.swap_costs = costs
        self._free_share = retention.free_share
        self._disk = disk
        self.host = HostPool(config.num_host_pages)
        swaps = policy.preemption.keeps_state and not (
            retention.uses_host or config.has_slot_state  # pages alone continue no state
        )
        self._swap_space = SwapSpace(self.host if swaps else None, costs, config.max_pages_out)
        self._values = PageValues(
            config.page_size,
            retention.eviction,
            page_cost(config, costs),
            now,
            copy_s(config, costs),
            learns_reuse=retention.learns_reuse,
        )
        self.weights = WeightsIdentity(host_memory, has_disk=disk is not None)
        self._cache = PageCache(
            config.num_pages,
            self.host if retention.uses_host else None,
            self._values,
            disk=disk,
            host_memory=host_memory,
            identity=self.weights.of_cache(),
            max_pages_out=config.max_pages_out,
        )
        self._restoring = Restoring(self._cache)
        self._snapshots = None
        if config.num_snapshots and retention.keeps_pages:
            self._snapshots = SnapshotCache(
                config.num_snapshots,
                config.page_size,
                retention.states,
                now,
                config.num_host_snapshots if retention.uses_host else 0,
                disk,
                host_states,
            )
        self.retrieval = Retrieval(self._cache, now, on_arrival, self._snapshots)
        self._prefixes = PrefixCacheManager(
            self._cache,
            self._values,
            self.retrieval,
            page_size=config.page_size,
            sizes=self._sizes,
            snapshots=self._snapshots,
            keeps_pages=retention.keeps_pages,
            holds=None if retention.holding is None else Holds(retention.holding, now),
            now=now,
        )
        # The pages of a context are of no use to another engine without its state.
        host_memory = None if config.has_slot_state else host_memory
        self.transfer = PageTransfer(
            self._cache, host_memory, self.weights, self._keys_of, self._sizes, now
        )

    # ---- what there is ----

    @property
    def num_available(self) -> int:
        return self._cache.pool.num_available

    def num_held_for_others(self, sequence: Sequence) -> int:
        """Return the available pages that the admission of a sequence must leave (`Holds`)."""
        return self._prefixes.num_held_for_others(sequence)

    def usage(self) -> PageUsage:
        return PageUsage.of(self._cache.pool, self.host, self._disk)

    def counters(self) -> dict[str, float]:
        swapped, prefixes = self._swap_space, self._prefixes
        snapshots = self._snapshots
        return {
            "num_snapshots_saved": 0 if snapshots is None else snapshots.num_saved,
            "num_snapshots_restored": 0 if snapshots is None else snapshots.num_restored,
            "num_snapshots_out": 0 if snapshots is None else snapshots.num_out,
            "num_snapshots_in": 0 if snapshots is None else snapshots.num_in,
            "num_outgrown": self.num_outgrown,
            "num_pages_out": swapped.num_pages_out + self._cache.num_pages_out,
            "num_pages_in": swapped.num_pages_in + self._cache.incoming.num_taken,
            "num_pages_prefetched": prefixes.num_prefetched,
            "num_recomputed": swapped.num_recomputed,
            "num_prefix_queried": prefixes.num_queried,
            "num_prefix_hit": prefixes.num_hit,
            "num_prefix_hit_on_host": prefixes.num_hit_on_host,
            "num_prefix_hit_on_disk": prefixes.num_hit_on_disk,
            "num_evicted_tokens": prefixes.num_evicted,
            "penalty_s": swapped.penalty_s,
        }

    def residency(self, tokens: Seq[int]) -> list[Tier]:
        """Return the fastest tier that holds each full page of a context.

        With page groups, it is the slowest of those with the pages that a next request begins with.
        """
        seen = self.transfer.keys_seen(tokens)
        return [
            max(map(self._cache.tier_of, keys), key=TIERS.index, default="nowhere") for keys in seen
        ]

    # ---- sequences that begin ----

    def new(self, request: Request) -> SequenceKV:
        return self._prefixes.new(request)

    def least_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the fewest pages that a waiting sequence can need, with the most sharing."""
        return sequence.kv.table.pages_for(num_tokens) - self._prefixes.most_shared(sequence)

    def fits_into(self, sequence: Sequence, num_tokens: int, num_pages: int) -> bool:
        """Whether a waiting sequence needs at most `num_pages` pages that no other owns."""
        excess = sequence.kv.table.pages_for(num_tokens) - num_pages
        return excess <= 0 or self._prefixes.shares(sequence, excess)

    def awaits_disk(self, sequence: Sequence) -> bool:
        return self._prefixes.awaits_disk(sequence)

    def begin(
        self, sequence: Sequence, num_tokens: int, *, is_first: bool = False
    ) -> list[tuple[int, int]]:
        """Reserve `num_tokens` tokens for a waiting sequence that fits.

        Return (index, page) of the pages it begins with: shared, to be filled from the host, or
        between such pages. If it is the first that runs, one plan may bring all of its pages.
        """
        kv = sequence.kv
        kv.group = 0
        if not kv.host_pages:
            entries = self._prefixes.begin(sequence, num_tokens)
            self._restoring.begin(sequence, None if is_first else self.config.max_pages_in)
        else:
            entries = self._begin_swapped(sequence, num_tokens)
        if entries is None:
            raise AssertionError("begin() was called although the sequence does not fit")
        self._swap_space.admitted(sequence)
        return entries

    def _begin_swapped(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
        """Own pages for what a sequence has on the host; None if the pool has too few."""
        kv = sequence.kv
        # Tokens in flight may be taken back, so that a query may still come from before them.
        position = min(kv.num_computed, sequence.num_known - 1)
        if not kv.table.begin(num_tokens, {}, position // self.config.page_size):
            return None
        kv.table.allocate(kv.num_computed)
        return kv.table.entries()

    # ---- sequences that run ----

    def leave_windows(self, running: Iterable[Sequence]) -> None:
        """Free the pages of running sequences that no query of the next plan, or later, sees.

        Steps in flight may read them; a later step that writes to them runs after these. Tokens
        that were planned and not read may be taken back, so that queries may come from the newest
        token that was read on.
        """
        if self._sizes is None:
            return
        for sequence in running:
            newest, table = sequence.num_known - 1, sequence.kv.table
            position = min(sequence.kv.num_computed, newest)
            assert isinstance(table, GroupedPageTable)
            self._cache.pass_by(table.pass_by(position, is_answer=position == newest))

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        return sequence.kv.table.reserve(num_tokens)

    def allocate(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        return sequence.kv.table.allocate(num_tokens)

    def computed(self, sequence: Sequence, start: int, end: int) -> None:
        """Record that a plan computes a sequence's tokens from `start` up to `end`."""
        sequence.kv.advance_to(end)
        self._prefixes.has_computed(sequence, end)
        if start < sequence.prompt_length:
            self._prefixes.computed(sequence)

    def compute_newest(self, sequence: Sequence) -> bool:
        """Record that a plan computes a sequence's newest output token, after all other tokens.

        Return False, unchanged, if more is left to compute, or a page for it is not owned.
        """
        kv, length = sequence.kv, sequence.planned_length
        if kv.num_computed + 1 != length or kv.ahead or length > kv.table.num_tokens:
            return False
        if kv.grid_tokens is not None and length % kv.grid_tokens == 0:  # a snapshot is taken
            return False
        kv.num_computed = length
        return True

    def take_back(self, sequence: Sequence, num_tokens: int) -> None:
        """Free the pages of planned tokens that a step did not deliver; they are reserved again.

        Steps in flight do not write to them: the device continues at the sequence's real end. If
        not even one token came, the KV of the newest token is computed again, to the same values.
        """
        kv = sequence.kv
        if sequence.phase is Phase.WAITING and not kv.host_pages:
            kv.num_dropped = max(0, kv.num_dropped - num_tokens)
            return
        kv.num_computed -= num_tokens
        if sequence.phase is Phase.RUNNING:
            kv.table.trim(kv.num_computed)
            kv.num_cached = min(kv.num_cached, kv.table.num_tokens // self.config.page_size)

    def handed_over(self, sequence: Sequence, group: int) -> None:
        sequence.kv.group = group

    # ---- sequences that go ----

    def save_state(
        self, sequence: Sequence, kind: SnapshotKind, *, has_ended: bool = False
    ) -> None:
        """Take a snapshot of the state of a running sequence that leaves its slot.

        `has_ended` says that its last token has been read, which nothing follows in its slot.
        """
        self._prefixes.save_state(sequence, kind, has_ended=has_ended)

    def preempt(self, sequence: Sequence, *, has_outgrown: bool) -> None:
        """Free a sequence's pages; its KV is cached, copied to the host, or dropped.

        A sequence that `has_outgrown` its reservation gets a larger one next.
        """
        self._prefixes.leave(sequence, returns=True)
        self._swap_space.save(sequence)
        sequence.kv.close()
        if not sequence.num_in_flight:
            self._prefixes.read(sequence)
        if has_outgrown:
            sequence.kv.num_outgrown += 1
            self.num_outgrown += 1

    def release(self, sequence: Sequence) -> None:
        """Free the pages of a sequence whose last token is planned; full ones may be cached."""
        self._prefixes.leave(sequence)
        sequence.kv.close()

    def reopen(self, sequence: Sequence) -> None:
        """Reset a sequence that was released and has not ended; it waits again."""
        sequence.kv.num_dropped, sequence.kv.num_computed = sequence.kv.num_computed, 0

    def end(self, sequence: Sequence, *, is_right: bool, is_cut: bool) -> None:
        """Free everything that a sequence holds, after its phase and tokens are final.

        If not `is_right`, other sequences may not reuse its KV. `is_cut` says that the device may
        have gone beyond its last token.
        """
        if is_cut:
            self._prefixes.forget_state(sequence)
        self._swap_space.drop(sequence)
        self.retrieval.release(sequence.key)
        if is_right:
            self._prefixes.leave(sequence)
        else:
            self._prefixes.evict(sequence)
        sequence.kv.close()
        self._prefixes.read(sequence)

    def all_read(self, sequence: Sequence) -> None:
        """Name the pages that a sequence left, once none of its tokens is in flight."""
        self._prefixes.read(sequence)

    def restart(self, sequence: Sequence, *, keeps_output: bool) -> None:
        """Drop the KV of a sequence that runs or waits, because it is no longer right."""
        kv = sequence.kv
        if sequence.phase is Phase.RUNNING:
            self._prefixes.evict(sequence)
            kv.close()
            kv.num_computed = 0
        self._swap_space.drop(sequence)
        if not keeps_output:
            kv.forget_tokens()

    # ---- the next plan ----

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    def prefetch(self, waiting: Iterable[Sequence]) -> None:
        """Bring pages of waiting sequences with the next plan, which is complete otherwise."""
        if self.config.prefetches:
            self._prefixes.prefetch(waiting)

    def copies(self, admitted: Iterable[Sequence]) -> tuple[PageCopies, PageCopies]:
        """Return the next plan's copies: (device page, host page), and (host page, device page)."""
        out = self._swap_space.copies_out()
        out += self._cache.copies_out(free_share=self._free_share)
        back = self._swap_space.copies_in(admitted)
        return out, back + self._restoring.copies(self.config.max_pages_in)

    def state_copies(
        self, admitted: Iterable[Sequence]
    ) -> tuple[StateCopies, tuple[StateCopy, ...]]:
        """Return the next plan's copies of states: those before and those after its other edits.

        These are the copies from slots and between tiers, and those to the slots of `admitted`.
        """
        if self._snapshots is None:
            return (), ()
        restores = self._prefixes.restores(admitted)
        saves = self._snapshots.take_copies()
        self._prefixes.save_reached()
        return saves, restores

    def restores_in(self, groups: Collection[int]) -> bool:
        """Whether a step of one of these groups may bring pages that running sequences await."""
        return 0 in groups and bool(self._restoring)

    # ---- another pool, other weights, the end ----

    def config_with(self, num_pages: int) -> EngineConfig:
        return replace(self.config, num_pages=num_pages)

    def fits(self, num_pages: int) -> bool:
        pool = self._cache.pool
        return pool.num_owned + pool.num_reserved <= num_pages - 1

    def shrink(self, num_pages: int) -> list[tuple[int, int]]:
        """Evict what a pool of `num_pages` pages has no room for, with no step in flight.

        Return the fewest (from, to) moves of pages, to be carried out and then passed to `resize`.
        """
        self._swap_space.drop_unsaved()
        if self._snapshots is not None:
            self._snapshots.drop_uncopied()
        self._cache.drop_uncopied()
        self._cache.shrink(num_pages)
        return fewest_moves(self._cache.pool.held, num_pages)

    def resize(self, num_pages: int, moves: Moves, running: Iterable[Sequence]) -> None:
        """Switch to a pool of `num_pages` pages, after `shrink`; `running` sequences have pages."""
        self._cache.pool.resize(num_pages, moves)
        self.config = self.config_with(num_pages)
        targets = dict(moves)
        self._cache.relocate(targets)
        for sequence in running:
            sequence.kv.table.relocate(targets)

    def value_by(self, cost: RecomputeCost) -> None:
        if self._sizes is None and not self.config.has_slot_state:
            self._values.value_by(cost)

    def swap_by(self, costs: SwapCosts | None) -> None:
        self.swap_costs = costs
        self._swap_space.decide_by(costs)
        self._values.copy_by(copy_s(self.config, costs))

    def weights_changed(self, name: WeightsName, sequences: Iterable[Sequence]) -> None:
        """Evict all cached pages, also from the state of `sequences`, and change the keys."""
        self.weights.change(name)
        for sequence in sequences:
            sequence.kv.weights_changed()
        self.clear()

    def clear(self, suffix: bytes = b"") -> None:
        """Evict all cached pages; a `suffix` also hides those of the same weights on the disk."""
        self.retrieval.clear()
        if self._snapshots is not None:
            self._snapshots.clear()
        self._cache.clear(self.weights.of_cache() + suffix)

    def close_host(self) -> None:
        """Use the host's memory no longer, after `clear`."""
        self.host.close()
        if self._snapshots is not None:
            self._snapshots.close_host()

    def evict(self, tokens: Seq[int], pages: Iterable[int]) -> None:
        """Evict full pages of a context, by index, that are on the device and in no sequence."""
        keys, num_tables = self._keys_of(tokens), self.config.page_layout.num_tables
        own = [key_in(keys[index], table) for index in pages for table in range(num_tables)]
        for page in self._cache.find(own):
            if self._cache.is_cached(page):
                self._cache.evict(page)

    def save(self) -> None:
        """Move everything on the host to the disk; no sequence may run any longer."""
        if self._snapshots is not None:
            self._snapshots.move_to_disk()
        self._cache.save()

    def flush(self, free_share: float = 1.0) -> tuple[StateCopies, PageCopies]:
        """Return copies to the host of all cached states and pages that it has room for.

        A `free_share` of 0 copies only the pages that must be.
        """
        states: StateCopies = ()
        if self._snapshots is not None and free_share:
            self._snapshots.copy_out()
            states = self._snapshots.take_copies()
        return states, self._cache.copies_out(free_share=free_share)

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()

    def _keys_of(self, tokens: Seq[int]) -> Seq[bytes]:
        return keys_of(tokens, self.config, self._cache.identity)

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Raise AssertionError unless pages and reservations of unfinished sequences add up."""
        check_integrity(self._cache, self.host, self.config.page_size, sequences)
        if self._snapshots is not None:
            self._snapshots.check_integrity()
        self._prefixes.check_integrity(sequences)


def check_integrity(
    cache: PageCache, host: HostPool, page_size: int, sequences: Iterable[Sequence]
) -> None:
    """Raise AssertionError unless invariants 1 and 2 of docs/architecture.md hold."""
    cache.check_integrity()
    pool = cache.pool
    owned: dict[int, int] = {}
    num_reserved = num_swapped = 0
    for sequence in sequences:
        kv = sequence.kv
        runs = sequence.phase is Phase.RUNNING
        assert (kv.table.reservation > 0) == runs, f"{sequence.phase} holds {kv.table.reservation}"
        assert not runs or kv.num_computed <= kv.table.num_tokens, (
            "computed tokens are outside the page table"
        )
        assert kv.num_cached * page_size <= kv.table.num_tokens, (
            "pages are cached that are not there"
        )
        assert not kv.host_pages or sequence.phase is Phase.WAITING, "KV in two places"
        if isinstance(kv.table, GroupedPageTable):
            kv.table.check_integrity()
        for page in kv.table.pages:
            owned[page] = owned.get(page, 0) + 1
        num_reserved += kv.table.reservation - kv.table.num_pages
        num_swapped += len(kv.host_pages)
    assert num_reserved == pool.num_reserved, "reservations do not add up"
    assert len(owned) == pool.num_owned, "owned pages do not add up"
    for page, count in owned.items():
        assert pool.refcount(page) == count, f"page {page}: wrong reference count"
    num_allocated = host.num_pages - host.num_free
    assert num_swapped + cache.num_host_pages == num_allocated, "host pages do not add up"
