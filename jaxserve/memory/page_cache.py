"""Pages that nobody owns but somebody may want again: found by their tokens, given up by value."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, final

from jaxserve.memory.chunks import Branch, Chunk
from jaxserve.memory.disk_tier import DiskTier, HostMemory
from jaxserve.memory.eviction import Eviction, RecomputeCost
from jaxserve.memory.host_pool import HostPool
from jaxserve.memory.page_pool import PagePool
from jaxserve.memory.ranking import Ranking

Tier = Literal["device", "host", "disk", "nowhere"]

# Chunks that are copied ahead of time before one step, at most.
_MAX_AHEAD = 32


@final
class PageCache:
    """Knows every chunk by its key, on the device or the host, and which to give up.

    The device's pages are those of `pool`: owned ones are in use, cached ones can be reclaimed.
    Copies to and from the host are collected for the next plan. A host page that one of them
    reads or writes stays what it is until that plan is made.

    Args:
      host: pages of the host, which others may allocate too; None to keep nothing there.
      cost: of computing a chunk anew.
      copy_s: seconds to bring a page to the host, and again to bring it back; what costs less to
        compute is not copied.
      now: the clock.
      disk: below the host, for what leaves it; None without one.
      host_memory: the contents of the host's pages; only read and written for the disk.
      identity: of the model and its weights, which keys begin with.

    Attributes:
      identity: as given, or as `clear` was told since.
      num_pages_out, num_pages_in: pages copied to the host and back.
      num_dropped: chunks that were given up altogether.
    """

    def __init__(
        self,
        num_pages: int,
        host: HostPool | None,
        page_size: int,
        eviction: Eviction,
        cost: RecomputeCost,
        now: Callable[[], float],
        copy_s: float = 0.0,
        *,
        disk: DiskTier | None = None,
        host_memory: HostMemory | None = None,
        identity: bytes = b"",
    ):
        self.pool = PagePool(num_pages, self._reclaim)
        self.disk = disk
        self.identity = identity
        self._host = host
        self._host_memory = host_memory
        self._cost = cost
        self._costs_s: dict[int, float] = {}
        self.num_pages_out = 0
        self.num_pages_in = 0
        self.num_dropped = 0
        self._page_size = page_size
        self._eviction = eviction
        self._copy_s = copy_s
        self._now = now
        self._by_key: dict[bytes, Chunk] = {}
        self._by_page: dict[int, Chunk] = {}
        self._by_host_page: dict[int, Chunk] = {}
        # Keys of chunks that were given up, the latest last.
        self._lost: OrderedDict[bytes, None] = OrderedDict()
        # Device page -> host page, and the other way round.
        self._copies_in: dict[int, int] = {}
        self._copies_out: dict[int, int] = {}
        self._victims = Ranking(self._by_page, self.is_cached, self.order)
        self._to_copy = Ranking(self._by_page, self._is_uncopied, self.order)
        self._host_victims = Ranking(self._by_host_page, self._may_leave_host, self.order)

    def value_by(self, cost: RecomputeCost) -> None:
        """Have chunks cost so much to compute, from here on."""
        self._cost = cost
        self._costs_s.clear()

    def copy_by(self, copy_s: float) -> None:
        """Have chunks cost so much to copy, from here on."""
        self._copy_s = copy_s

    @property
    def max_host_pages(self) -> int:
        """The most chunks that the host can hold."""
        return 0 if self._host is None else self._host.num_pages

    @property
    def num_host_pages(self) -> int:
        """Host pages that hold a chunk."""
        return len(self._by_host_page)

    # ---- what is here ----

    def find(self, keys: Sequence[bytes]) -> list[Chunk]:
        """The chunks that lie somewhere, in the order of the keys."""
        return [chunk for key in keys if (chunk := self._by_key.get(key)) is not None]

    def where(self, key: bytes) -> Tier:
        """The fastest place where a chunk lies."""
        chunk = self._by_key.get(key)
        if chunk is None:
            return "disk" if self.disk is not None and key in self.disk else "nowhere"
        return "host" if chunk.page is None else "device"

    def bring(self, index: int, key: bytes, contents: bytes, branch: Branch) -> bool:
        """Put what the disk gave on the host; False where there is no room.

        Args:
          branch: that it belongs to.
        """
        chunk = self._by_key.get(key)
        if chunk is None:
            if not self._make_host_room(None):
                return False
            assert self._host_memory is not None
            chunk = self._by_key[key] = Chunk(index, key)
            self._lost.pop(key, None)
            self._host_memory.write_host_page(self._set_host_page(chunk), contents)
        chunk.join(branch)
        branch.tip = chunk
        return True

    def save(self) -> None:
        """Move everything on the host to the disk, for another run; its pages are free then."""
        for chunk in sorted(self._by_host_page.values(), key=self.order):
            self._write_to_disk(chunk, waits=True)
            self.forget(chunk)

    def num_lost(self, keys: Iterable[bytes]) -> int:
        """How many of these were here once, and were given up not long ago."""
        return sum(key in self._lost for key in keys)

    @property
    def on_device(self) -> Mapping[int, Chunk]:
        """Chunks by their page."""
        return self._by_page

    def at(self, page: int) -> Chunk | None:
        """The chunk whose page on the device this is."""
        return self._by_page.get(page)

    def value(self, chunk: Chunk) -> float:
        branches = chunk.branches
        if len(branches) > 1:
            # The last of them where none counts any more.
            branches = [each for each in branches if each.counts] or branches[-1:]
        active = [branch.last_active_s for branch in branches]
        return self._eviction.value(self._cost_s(chunk), active, self._now())

    def order(self, chunk: Chunk) -> tuple[float, int]:
        """Who goes first: by value, and of equal ones by position."""
        return self.value(chunk), chunk.index

    def is_cached(self, chunk: Chunk) -> bool:
        """Whether it is on the device and nobody owns it."""
        return chunk.page is not None and self.pool.is_cached(chunk.page)

    # ---- what comes and goes ----

    def add(self, page: int, index: int, key: bytes | None, branch: Branch) -> Chunk:
        """Keep the contents of an owned page, which nobody will write to any more.

        Where another page has the same contents already, that one is kept and not this.

        Args:
          key: None where not all of its tokens have been read; `name` follows then.
        """
        chunk = None if key is None else self._by_key.get(key)
        if chunk is None:
            chunk = Chunk(index, key)
            if key is not None:
                self._by_key[key] = chunk
                self._lost.pop(key, None)
        if chunk.page is None:
            self._set_page(chunk, page)
        chunk.join(branch)
        return chunk

    def name(self, chunk: Chunk, key: bytes) -> None:
        """The tokens of a chunk are known; where it is gone or another is the same, it goes."""
        if not chunk.is_resident:
            return
        if key in self._by_key:
            self.forget(chunk)
            return
        chunk.key = key
        self._by_key[key] = chunk
        self._lost.pop(key, None)

    def restore(self, chunk: Chunk, page: int) -> None:
        """Have the next plan bring a chunk from the host to an owned page."""
        assert chunk.page is None and chunk.host_page is not None
        self._copies_in[page] = chunk.host_page
        self._set_page(chunk, page)

    def forget(self, chunk: Chunk) -> None:
        """Give up a chunk wherever it lies."""
        self.leave_device(chunk)
        self._leave_host(chunk)

    def leave_device(self, chunk: Chunk) -> None:
        """Free its page, or have it be free once nobody owns it."""
        if chunk.page is None:
            return
        self._copies_in.pop(chunk.page, None)
        self.pool.forget(chunk.page)
        del self._by_page[chunk.page]
        chunk.page = None
        self._drop_if_gone(chunk)

    def clear(self, identity: bytes) -> None:
        """Give up everything: other weights compute other contents.

        Args:
          identity: of the weights from here on.
        """
        for chunk in [*self._by_page.values(), *self._by_host_page.values()]:
            self.forget(chunk)
        self._lost.clear()
        self.identity = identity

    # ---- copies of the next plan ----

    def is_leaving(self, chunk: Chunk) -> bool:
        """Whether the next plan copies it to the host."""
        return chunk.host_page in self._copies_out

    @property
    def num_coming(self) -> int:
        """Chunks that the next plan brings from the host so far."""
        return len(self._copies_in)

    def copies_out(self, *, free_share: float) -> tuple[tuple[int, int], ...]:
        """(device page, host page) of what has to be copied now, and of what can be ahead of time.

        The latter, of the lowest value first, as long as less than `free_share` of the pool can be
        taken without loss; not while something comes back, which has the link to itself (thesis,
        sections 3.4.3.2 and 3.5.1).
        """
        if not self._copies_in:
            self._copy_ahead(free_share)
        copies = tuple((page, host_page) for host_page, page in self._copies_out.items())
        self._copies_out.clear()
        self.num_pages_out += len(copies)
        return copies

    def copies_in(self) -> tuple[tuple[int, int], ...]:
        """(host page, device page), to be made after `copies_out`."""
        copies = tuple((host_page, page) for page, host_page in self._copies_in.items())
        self._copies_in.clear()
        self.num_pages_in += len(copies)
        return copies

    def forget_uncopied(self) -> None:
        """Before device pages move: give up what no plan has copied to the host yet."""
        for host_page in list(self._copies_out):
            chunk = self._by_host_page[host_page]
            if chunk.page in self._copies_in:  # nor would it come back
                self.leave_device(chunk)
            self._leave_host(chunk)

    # ---- another pool ----

    def shrink(self, num_pages: int) -> None:
        """Give cached pages up, the lowest value first, until all held ones fit into the pool."""
        taken = self.pool.num_owned + self.pool.num_promised
        excess = taken + self.pool.num_cached - (num_pages - 1)
        cached = filter(self.is_cached, self._by_page.values())
        for chunk in heapq.nsmallest(max(0, excess), cached, key=self.order):
            self.leave_device(chunk)

    def relocate(self, targets: Mapping[int, int]) -> None:
        """Follow pages that `PagePool.resize` moved."""
        self._copies_in = {targets.get(p, p): host for p, host in self._copies_in.items()}
        chunks = list(self._by_page.values())
        self._by_page.clear()
        for chunk in chunks:
            assert chunk.page is not None
            chunk.page = targets.get(chunk.page, chunk.page)
            self._by_page[chunk.page] = chunk

    # ---- giving up ----

    def _reclaim(self, count: int) -> None:
        for _ in range(count):
            chunk = self._victims.lowest()
            assert chunk is not None, "more pages are promised than cached"
            if chunk.host_page is None and self._is_worth_copying(chunk):
                self._copy_out(chunk)
            self.leave_device(chunk)

    def _copy_ahead(self, free_share: float) -> None:
        if not self.max_host_pages:
            return
        pool = self.pool
        lossless = pool.num_free + pool.num_copied - pool.num_promised
        missing = min(int(free_share * pool.num_usable) - lossless, _MAX_AHEAD)
        missing = min(missing, pool.num_cached - pool.num_copied)
        for _ in range(missing):
            chunk = self._to_copy.lowest()
            if chunk is None or (self._is_worth_copying(chunk) and not self._copy_out(chunk)):
                return

    def _is_worth_copying(self, chunk: Chunk) -> bool:
        """There and back."""
        return 2 * self._copy_s <= self._cost_s(chunk)

    def _copy_out(self, chunk: Chunk) -> bool:
        """Have the next plan copy a chunk to the host, in place of one of less value."""
        if not self._make_host_room(chunk):
            return False
        assert chunk.page is not None
        self._copies_out[self._set_host_page(chunk)] = chunk.page
        self.pool.mark_copied(chunk.page, True)
        return True

    def _make_host_room(self, chunk: Chunk | None) -> bool:
        """Have a host page free, for `chunk` or for what came from the disk.

        Where nothing is below the host, only what is of less value gives way.
        """
        if self._host is None:
            return False
        if self._host.num_free:
            return True
        victim = self._host_victims.lowest()
        if victim is None:
            return False
        if self.disk is not None:
            self._write_to_disk(victim)
        elif chunk is not None and self.order(victim) >= self.order(chunk):
            self._host_victims.put_back(victim)
            return False
        self._leave_host(victim)
        return True

    def _write_to_disk(self, chunk: Chunk, *, waits: bool = False) -> None:
        if chunk.key is None or self.disk is None or chunk.key in self.disk:
            return
        assert self._host_memory is not None and chunk.host_page is not None
        self.disk.put(chunk.key, self._host_memory.read_host_page(chunk.host_page), waits=waits)

    def _leave_host(self, chunk: Chunk) -> None:
        if chunk.host_page is None or self._host is None:
            return
        self._copies_out.pop(chunk.host_page, None)
        self._host.release([chunk.host_page])
        del self._by_host_page[chunk.host_page]
        chunk.host_page = None
        if chunk.page is not None:
            self.pool.mark_copied(chunk.page, False)
        self._drop_if_gone(chunk)

    def _drop_if_gone(self, chunk: Chunk) -> None:
        if chunk.is_resident:
            return
        self.num_dropped += 1
        if chunk.key is not None:
            del self._by_key[chunk.key]
            self._lost[chunk.key] = None
            if len(self._lost) > 4 * (self.pool.num_usable + self.max_host_pages):
                self._lost.popitem(last=False)

    # ---- helpers ----

    def _set_page(self, chunk: Chunk, page: int) -> None:
        self.pool.keep(page, is_copied=chunk.host_page is not None)
        chunk.page = page
        self._by_page[page] = chunk

    def _set_host_page(self, chunk: Chunk) -> int:
        assert self._host is not None
        (host_page,) = self._host.take(1)
        chunk.host_page = host_page
        self._by_host_page[host_page] = chunk
        return host_page

    def _cost_s(self, chunk: Chunk) -> float:
        cost_s = self._costs_s.get(chunk.index)
        if cost_s is None:
            cost_s = self._costs_s[chunk.index] = self._cost((chunk.index + 1) * self._page_size)
        return cost_s

    def _is_uncopied(self, chunk: Chunk) -> bool:
        return chunk.host_page is None and self.is_cached(chunk)

    def _may_leave_host(self, chunk: Chunk) -> bool:
        """No copy of the next plan reads or writes its host page."""
        if chunk.host_page is None or chunk.host_page in self._copies_out:
            return False
        return chunk.page not in self._copies_in

    def check_integrity(self) -> None:
        """Raise AssertionError unless every chunk lies where the books say, and nowhere else."""
        self.pool.check_integrity()
        for page, chunk in self._by_page.items():
            assert chunk.page == page, "a chunk is not on its page"
            copied = self.pool.is_copied(page)
            assert copied == (chunk.host_page is not None), "a copy that is none"
        assert set(self._by_page) == self.pool.kept, "pages are kept for nobody"
        for host_page, chunk in self._by_host_page.items():
            assert chunk.host_page == host_page, "a chunk is not on its host page"
            assert self._host is not None and self._host.is_taken(host_page), "a free host page"
        for key, chunk in self._by_key.items():
            assert chunk.key == key and chunk.is_resident, "a chunk under a wrong key"
        for page, host_page in self._copies_in.items():
            assert self._by_page[page].host_page == host_page, "a copy of nothing comes in"
