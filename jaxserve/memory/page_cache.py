"""Cached pages that no sequence owns: found by their tokens, evicted by value."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, final, get_args

from jaxserve.memory.cached_page import Branch, CachedPage
from jaxserve.memory.disk_tier import DiskTier, HostMemory
from jaxserve.memory.eviction import PageValues, Ranking
from jaxserve.memory.page_pool import HostPool, PagePool

Tier = Literal["device", "host", "disk", "nowhere"]
# The fastest first.
TIERS: tuple[Tier, ...] = get_args(Tier)

# The most pages that are copied ahead of time before one step.
_MAX_AHEAD = 32


@final
class IncomingCopies:
    """The copies from host pages to device pages that no plan has taken yet, oldest first."""

    def __init__(self) -> None:
        self.num_taken = 0
        self._host_pages: dict[int, int] = {}  # by device page

    def __len__(self) -> int:
        return len(self._host_pages)

    def __contains__(self, device_page: int | None) -> bool:
        return device_page in self._host_pages

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (device page, host page)."""
        return iter(self._host_pages.items())

    def add(self, host_page: int, device_page: int) -> None:
        self._host_pages[device_page] = host_page

    def drop(self, device_page: int) -> None:
        self._host_pages.pop(device_page, None)

    def last_of(self, device_pages: Collection[int]) -> int | None:
        wanted = set(device_pages)
        return next((page for page in reversed(self._host_pages) if page in wanted), None)

    def take(self, most: int | None) -> tuple[tuple[int, int], ...]:
        """Remove and return the (host page, device page) of the first `most` copies, or of all."""
        pages = [*itertools.islice(self._host_pages, most)]
        copies = tuple((self._host_pages.pop(page), page) for page in pages)
        self.num_taken += len(copies)
        return copies

    def relocate(self, targets: Mapping[int, int]) -> None:
        moved = {targets.get(page, page): host for page, host in self._host_pages.items()}
        self._host_pages = moved


@final
class PageCache:
    """Finds every cached page by its key, on the device or the host, and chooses which to evict.

    The device's pages are those of `pool`: owned ones are in use, cached ones can be reclaimed.
    Copies to and from the host are collected for the next plans. A host page that one of them reads
    or writes is not reused before that plan is made.

    Args:
      num_pages: of the device's pool, the null page included.
      host: pages of the host, which other parts may allocate too; None to cache nothing there.
      values: of pages; one that costs less to compute than to copy is not copied.
      disk: for pages that leave the host; None without one. `host_memory` is accessed only for it.
      identity: of the model and its weights, which keys begin with; `clear` may replace it.
      max_pages_out: the most evicted pages that one plan copies to the host.

    Attributes:
      incoming: copies from the host, to be made after those of `copies_out`.
      num_evicted: pages that were evicted from their last tier above the disk.
      branches: every conversation with pages here, and some that had pages recently.
    """

    def __init__(
        self,
        num_pages: int,
        host: HostPool | None,
        values: PageValues,
        *,
        disk: DiskTier | None = None,
        host_memory: HostMemory | None = None,
        identity: bytes = b"",
        max_pages_out: int = 1 << 30,
    ):
        self.pool = PagePool(num_pages, self._reclaim)
        self.disk = disk
        self.identity = identity
        self.num_pages_out = self.num_evicted = 0
        self._host = host
        self._host_memory = host_memory
        self._max_pages_out = max_pages_out
        self._values = values
        self.branches: dict[Branch, None] = {}
        self._by_key: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        self._by_host_page: dict[int, CachedPage] = {}
        # Pages that stay on the host while a sequence begins with them.
        self._held: Collection[CachedPage] = ()
        # Pages behind their sequences' windows, oldest first, and their uses at the time.
        self._passed: dict[CachedPage, int] = {}
        # Keys of evicted pages, the latest last.
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self.incoming = IncomingCopies()
        self._copies_out: dict[int, int] = {}  # host page -> device page
        branches, rank = self.branches, values.rank
        self._victims = Ranking(branches, "on_device", self.is_cached, rank)
        self._to_copy = Ranking(branches, "uncopied", self._is_uncopied, rank)
        self._host_victims = Ranking(branches, "on_host", self._may_leave_host, rank)

    # ---- what is here ----

    @property
    def max_host_pages(self) -> int:
        return 0 if self._host is None else self._host.num_pages

    @property
    def num_host_pages(self) -> int:
        return len(self._by_host_page)

    @property
    def on_device(self) -> Mapping[int, CachedPage]:
        """Cached pages by their page of the device."""
        return self._by_page

    def find(self, keys: Sequence[bytes]) -> list[CachedPage]:
        return list(filter(None, map(self._by_key.get, keys)))

    def find_leading(self, keys: Sequence[bytes]) -> list[CachedPage]:
        """Return the pages of these keys up to the first that is not cached."""
        found = itertools.takewhile(lambda page: page is not None, map(self._by_key.get, keys))
        return [page for page in found if page is not None]

    def tier_of(self, key: bytes) -> Tier:
        page = self._by_key.get(key)
        if page is None:
            return "disk" if self.disk is not None and key in self.disk else "nowhere"
        return "host" if page.device_page is None else "device"

    def on_page(self, device_page: int) -> CachedPage | None:
        return self._by_page.get(device_page)

    def is_cached(self, page: CachedPage) -> bool:
        return page.device_page is not None and self.pool.is_cached(page.device_page)

    def has_rested(self, branch: Branch) -> None:
        """Record that no sequence continues a conversation: its pages may be copied ahead."""
        self._to_copy.has_rested(branch)

    def were_evicted(self, keys: Iterable[bytes]) -> list[bool]:
        """Return of each whether it was evicted recently, and not because a window had passed."""
        return [*map(self._evicted.__contains__, keys)]

    # ---- what comes ----

    def add(self, device_page: int, index: int, key: bytes | None, branch: Branch) -> CachedPage:
        """Cache an owned page, now final, unless another page has the same contents.

        `key` is None while some of its tokens have not been read; `set_key` follows then.
        """
        page = None if key is None else self._by_key.get(key)
        if page is None:
            page = CachedPage(index, key)
            if key is not None:
                self._put_under(key, page)
        if page.device_page is None:
            self._set_device_page(page, device_page)
        page.join(branch)
        self.branches[branch] = None
        return page

    def set_key(self, page: CachedPage, key: bytes) -> None:
        """Set the key of a page; evict it if another page has the same contents."""
        if page.is_resident and key in self._by_key:
            self.evict(page)
        elif page.is_resident:
            page.key = key
            self._put_under(key, page)

    def hold_on_host(self, pages: Collection[CachedPage]) -> None:
        """Evict none of these pages from the host until the next call."""
        self._held = pages

    def restore(self, page: CachedPage, device_page: int) -> None:
        """Copy a page from the host to an owned device page with the next plan."""
        assert page.device_page is None and page.host_page is not None
        self.incoming.add(page.host_page, device_page)
        self._set_device_page(page, device_page)

    def load(self, index: int, key: bytes, contents: bytes, branch: Branch) -> bool:
        """Put contents from the disk on the host; return False if there is no room."""
        page = self._by_key.get(key)
        if page is None:
            if not self._make_host_room(None):
                return False
            assert self._host_memory is not None
            page = CachedPage(index, key)
            self._put_under(key, page)
            try:
                self._host_memory.write(self._set_host_page(page), contents)
            except Exception:
                self._evict_from_host(page)
                raise
        page.join(branch)
        self.branches[branch] = None
        branch.grow_to(page)
        return True

    def copy_to_host(self, key: bytes) -> bool:
        """Copy a page to the host with the next plan, unless it is there; False if it cannot."""
        page = self._by_key.get(key)
        return page is not None and (page.host_page is not None or self._copy_out(page))

    # ---- what goes ----

    def pass_by(self, device_pages: Iterable[int]) -> None:
        """Record that these pages are behind their sequence's window: they are reclaimed first.

        A page counts until another sequence uses it.
        """
        for device_page in device_pages:
            page = self._by_page.get(device_page)
            if page is not None:
                self._passed.pop(page, None)
                self._passed[page] = page.num_uses

    def evict(self, page: CachedPage) -> None:
        self.evict_from_device(page)
        self._evict_from_host(page)

    def evict_passed(self) -> bool:
        """Evict the first page behind a window from the device; False if there is none."""
        while self._passed:
            page = next(iter(self._passed))
            if self._passed.pop(page) != page.num_uses or not self.is_cached(page):
                continue
            self.evict_from_device(page)
            if page.key is not None:
                self._evicted.pop(page.key, None)
            return True
        return False

    def evict_from_device(self, page: CachedPage) -> None:
        """Free its device page, now or once no sequence owns it."""
        if page.device_page is None:
            return
        self.incoming.drop(page.device_page)
        self._passed.pop(page, None)
        self.pool.evict(page.device_page)
        del self._by_page[page.device_page]
        page.leave_device()
        self._drop_if_gone(page)

    def clear(self, identity: bytes) -> None:
        """Evict everything, because other weights, of this identity, compute other contents."""
        for page in [*self._by_page.values(), *self._by_host_page.values()]:
            self.evict(page)
        self._evicted.clear()
        self.identity = identity

    def save(self) -> None:
        """Move everything on the host to the disk, for another run, and free the host's pages."""
        for page in sorted(self._by_host_page.values(), key=self._values.rank):
            self._write_to_disk(page, waits=True)
            self.evict(page)

    # ---- copies of the next plan ----

    def is_outgoing(self, page: CachedPage) -> bool:
        return page.host_page in self._copies_out

    def last_incoming(self, device_pages: Sequence[int]) -> CachedPage | None:
        last = self.incoming.last_of(device_pages) if self.incoming else None
        return None if last is None else self._by_page[last]

    def copies_out(self, *, free_share: float) -> tuple[tuple[int, int], ...]:
        """Return (device page, host page) of the copies of the next plan.

        Pages of the lowest value are copied ahead of time while less than `free_share` of the pool
        can be taken without loss, and no pages come back, which then have the link to themselves
        (thesis, sections 3.4.3.2 and 3.5.1).
        """
        if not self.incoming:
            self._copy_ahead(free_share)
        copies = tuple((page, host_page) for host_page, page in self._copies_out.items())
        self._copies_out.clear()
        self.num_pages_out += len(copies)
        return copies

    def drop_uncopied(self) -> None:
        """Evict from the host what no plan has copied there yet, before device pages move."""
        for host_page in list(self._copies_out):
            page = self._by_host_page[host_page]
            if page.device_page in self.incoming:  # it is not copied back either
                self.evict_from_device(page)
            self._evict_from_host(page)

    def drop_copies(self, host_pages: Iterable[int]) -> None:
        """Evict from the host what a failed plan was to copy to these pages."""
        for page in [self._by_host_page[each] for each in host_pages if each in self._by_host_page]:
            self._evict_from_host(page)

    # ---- another pool ----

    def shrink(self, num_pages: int) -> None:
        """Evict cached pages, the lowest value first, until all held ones fit into the pool."""
        taken = self.pool.num_owned + self.pool.num_reserved
        excess = taken + self.pool.num_cached - (num_pages - 1)
        cached = filter(self.is_cached, self._by_page.values())
        for page in heapq.nsmallest(max(0, excess), cached, key=self._values.rank):
            self.evict_from_device(page)

    def relocate(self, targets: Mapping[int, int]) -> None:
        self.incoming.relocate(targets)
        pages = list(self._by_page.values())
        self._by_page.clear()
        for page in pages:
            assert page.device_page is not None
            page.device_page = targets.get(page.device_page, page.device_page)
            self._by_page[page.device_page] = page

    # ---- making room ----

    def _reclaim(self, count: int) -> None:
        for _ in range(count):
            if self.evict_passed():
                continue
            page = self._victims.lowest()
            assert page is not None, "more pages are reserved than cached"
            may_copy = page.host_page is None and len(self._copies_out) < self._max_pages_out
            if may_copy and self._values.is_worth_copying(page):
                self._copy_out(page)
            self.evict_from_device(page)

    def _copy_ahead(self, free_share: float) -> None:
        if not self.max_host_pages:
            return
        pool = self.pool
        lossless = pool.num_free + pool.num_copied + len(self._passed) - pool.num_reserved
        missing = min(int(free_share * pool.num_usable) - lossless, _MAX_AHEAD)
        missing = self._values.most_to_look_at(min(missing, pool.num_cached - pool.num_copied))
        for _ in range(missing):
            page = self._to_copy.lowest()
            if page is None or (self._values.is_worth_copying(page) and not self._copy_out(page)):
                return

    def _copy_out(self, page: CachedPage) -> bool:
        """Copy a page to the host with the next plan, replacing one of less value."""
        if not self._make_host_room(page):
            return False
        assert page.device_page is not None
        self._copies_out[self._set_host_page(page)] = page.device_page
        self.pool.mark_copied(page.device_page, True)
        return True

    def _make_host_room(self, page: CachedPage | None) -> bool:
        """Free a host page, for `page` or for a page from the disk.

        Without a disk, only a page of less value is replaced.
        """
        if self._host is None or self._host.num_free:
            return self._host is not None
        if (victim := self._host_victims.lowest()) is None:
            return False
        if self.disk is not None:
            self._write_to_disk(victim)
        elif page is not None and self._values.rank(victim) >= self._values.rank(page):
            self._host_victims.put_back(victim)
            return False
        self._evict_from_host(victim)
        return True

    def _write_to_disk(self, page: CachedPage, *, waits: bool = False) -> None:
        if page.key is None or self.disk is None or self.disk.use(page.key):
            return
        assert self._host_memory is not None and page.host_page is not None
        self.disk.put(page.key, self._host_memory.read(page.host_page), waits=waits)

    def _evict_from_host(self, page: CachedPage) -> None:
        if page.host_page is None or self._host is None:
            return
        self._copies_out.pop(page.host_page, None)
        self._host.free([page.host_page])
        del self._by_host_page[page.host_page]
        page.leave_host()
        if page.device_page is not None:
            self.pool.mark_copied(page.device_page, False)
        self._drop_if_gone(page)

    def _drop_if_gone(self, page: CachedPage) -> None:
        if page.is_resident:
            return
        self.num_evicted += 1
        page.branches.clear()
        if page.key is not None:
            del self._by_key[page.key]
            self._evicted[page.key] = None
            if len(self._evicted) > 4 * (self.pool.num_usable + self.max_host_pages):
                self._evicted.popitem(last=False)

    def _put_under(self, key: bytes, page: CachedPage) -> None:
        self._by_key[key] = page
        self._evicted.pop(key, None)

    def _set_device_page(self, page: CachedPage, device_page: int) -> None:
        self.pool.retain(device_page, is_copied=page.host_page is not None)
        page.put_on_device(device_page)
        self._by_page[device_page] = page

    def _set_host_page(self, page: CachedPage) -> int:
        assert self._host is not None
        (host_page,) = self._host.allocate(1)
        page.put_on_host(host_page)
        self._by_host_page[host_page] = page
        return host_page

    def _is_uncopied(self, page: CachedPage) -> bool:
        if page.host_page is not None or self._passed.get(page) == page.num_uses:
            return False
        return self.is_cached(page)

    def _may_leave_host(self, page: CachedPage) -> bool:
        """Whether no copy of the next plan uses its host page, and its contents can be read now."""
        if page.host_page is None or page.host_page in self._copies_out or page in self._held:
            return False
        if self.disk and self._host_memory and not self._host_memory.has_arrived(page.host_page):
            return False
        return page.device_page not in self.incoming

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is exactly where the tables say."""
        self.pool.check_integrity()
        for device_page, page in self._by_page.items():
            assert page.device_page == device_page, "a cached page is not on its page"
            copied = self.pool.is_copied(device_page)
            assert copied == (page.host_page is not None), "a copy that is none"
        assert set(self._by_page) == self.pool.retained, "a page is retained without contents"
        for host_page, page in self._by_host_page.items():
            assert page.host_page == host_page, "a cached page is not on its host page"
            assert self._host is not None and self._host.is_allocated(host_page), "a free host page"
        for key, page in self._by_key.items():
            assert page.key == key and page.is_resident, "a cached page under a wrong key"
        for device_page, host_page in self.incoming:
            assert self._by_page[device_page].host_page == host_page, "a copy of nothing comes in"
