"""The pools of KV pages of the device and of the host, and moves into a pool of another size."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import final

import numpy as np

NULL_PAGE = 0
# The null page and one that a sequence can own.
MIN_PAGES = 2
# What happens to contents after the last reference: dropped, retained, or held elsewhere too.
_DROPPED, _RETAINED, _COPIED = 0, 1, 2
# Minimum number of pages that `free` frees in one pass.
_MANY = 64

# (from, to) of pages.
Moves = Sequence[tuple[int, int]]


@final
class PagePool:
    """Counts the uses of the pages of the device's KV cache.

    A page is free, owned (reference count >= 1), or cached: owned by no sequence, with contents
    that may be reused (`retain`). Page 0 is the null page: padding writes there and it is never
    owned. `reserve` sets pages aside without naming them, so that a reservation costs nothing until
    it is allocated; owned plus reserved pages never exceed the pool.

    Args:
      reclaim: called with a number of cached pages to `evict`, when too few are free.
    """

    def __init__(self, num_pages: int, reclaim: Callable[[int], None] | None = None):
        _check_size(num_pages)
        self._take_states(np.zeros(num_pages, np.int32), np.zeros(num_pages, np.uint8))
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._num_reserved = 0
        self._num_cached = 0
        self._num_copied = 0
        self._num_gained = 0
        self._reclaim = reclaim

    @property
    def num_usable(self) -> int:
        """Pages that sequences can own: all except the null page."""
        return len(self._refcounts) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_copied(self) -> int:
        """Cached pages whose contents are elsewhere too: evicting them loses nothing."""
        return self._num_copied

    @property
    def num_owned(self) -> int:
        return self.num_usable - self.num_free - self._num_cached

    @property
    def num_gained(self) -> int:
        """How often a page became both owned and retained."""
        return self._num_gained

    @property
    def num_reserved(self) -> int:
        return self._num_reserved

    @property
    def num_available(self) -> int:
        """Free and cached pages that are not reserved."""
        return len(self._free) + self._num_cached - self._num_reserved

    def reserve(self, count: int) -> bool:
        """Set `count` pages aside; False, unchanged, if fewer are available."""
        if count > self.num_available:
            return False
        self._num_reserved += count
        return True

    def unreserve(self, count: int) -> None:
        if not 0 <= count <= self._num_reserved:
            raise ValueError(f"cannot give back {count} of {self._num_reserved} reserved pages")
        self._num_reserved -= count

    def allocate(self, count: int) -> list[int]:
        """Turn `count` reserved pages into owned ones, each with one reference."""
        if count > len(self._free) and self._reclaim is not None:
            self._reclaim(count - len(self._free))
        self.unreserve(count)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refcounts[page] = 1
        return pages

    def lock(self, pages: Iterable[int]) -> None:
        """Add a reference to each of `pages`, which must be owned or cached."""
        for page in pages:
            if self._refcounts[page] < 1:
                if not self._contents[page]:
                    raise ValueError(f"page {page} is free and cannot be shared")
                if self.num_available < 1:
                    raise ValueError(f"page {page} is reserved and cannot be shared")
                self._count_cached(page, -1)
                self._num_gained += 1
            self._refcounts[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Drop a reference to each of `pages`; one without references becomes free or cached."""
        for page in pages:
            if self._refcounts[page] < 1:
                raise ValueError(f"page {page} is not owned and cannot be freed")
            self._refcounts[page] -= 1
            if self._refcounts[page] == 0:
                if self._contents[page]:
                    self._count_cached(page, 1)
                else:
                    self._free.append(page)

    def free_all(self, table: array[int]) -> None:
        """`free` the pages of one table, int32 and all different; many in one pass."""
        if len(table) < _MANY:
            return self.free(table)
        pages = np.frombuffer(table, np.int32)
        counts, contents = np.asarray(self._refcounts), np.asarray(self._contents)
        left = counts[pages] - 1
        if left.min() < 0:
            raise ValueError(f"page {pages[left.argmin()]} is not owned and cannot be freed")
        counts[pages] = left
        ownerless = pages[left == 0]
        states = contents[ownerless]
        self._free += ownerless[states == _DROPPED].tolist()
        self._num_cached += int(np.count_nonzero(states))
        self._num_copied += int(np.count_nonzero(states == _COPIED))

    # ---- contents that may be wanted again ----

    def retain(self, page: int, *, is_copied: bool = False) -> None:
        """Cache an owned page once it has no owner; `is_copied` if it is elsewhere too."""
        if self._refcounts[page] < 1 or self._contents[page]:
            raise ValueError(f"page {page} is not owned, or retained already")
        self._contents[page] = _COPIED if is_copied else _RETAINED
        self._num_gained += 1

    def evict(self, page: int) -> None:
        """Drop the contents of a retained page; a cached one becomes free."""
        if self._refcounts[page] == 0:
            self._count_cached(page, -1)
            self._free.append(page)
        self._contents[page] = _DROPPED

    def mark_copied(self, page: int, is_copied: bool) -> None:
        if self.is_copied(page) != is_copied and self._refcounts[page] == 0:
            self._num_copied += 1 if is_copied else -1
        self._contents[page] = _COPIED if is_copied else _RETAINED

    def is_copied(self, page: int) -> bool:
        return self._contents[page] == _COPIED

    def is_cached(self, page: int) -> bool:
        return self._contents[page] != _DROPPED and self._refcounts[page] == 0

    def _count_cached(self, page: int, change: int) -> None:
        self._num_cached += change
        if self._contents[page] == _COPIED:
            self._num_copied += change

    # ---- all of them ----

    def refcount(self, page: int) -> int:
        return self._refcounts[page]

    @property
    def retained(self) -> set[int]:
        """Cached pages, and owned ones that will be cached."""
        return set(np.flatnonzero(self._contents).tolist())

    @property
    def held(self) -> list[int]:
        return np.flatnonzero(np.asarray(self._refcounts) | np.asarray(self._contents)).tolist()

    def resize(self, num_pages: int, moves: Sequence[tuple[int, int]]) -> None:
        """Change the pool to `num_pages` pages, after `moves` (of `fewest_moves`) were carried out.

        References and reservations stay. Page tables have to follow (`PageTable.relocate`).

        Raises:
          ValueError: owned and reserved pages do not fit, or a held page would be lost; nothing has
            changed.
        """
        _check_size(num_pages)
        if self.num_owned + self._num_reserved > num_pages - 1:
            raise ValueError(
                f"{self.num_owned} owned and {self._num_reserved} reserved pages do not fit into "
                f"{num_pages - 1}"
            )
        targets = dict(moves)
        refcounts, contents = np.zeros(num_pages, np.int32), np.zeros(num_pages, np.uint8)
        is_taken = [False] * num_pages
        for page in self.held:
            target = targets.get(page, page)
            if not NULL_PAGE < target < num_pages or is_taken[target]:
                raise ValueError(f"page {page} cannot go to {target}")
            is_taken[target] = True
            refcounts[target] = self._refcounts[page]
            contents[target] = self._contents[page]
        self._take_states(refcounts, contents)
        self._free = [page for page in range(num_pages - 1, NULL_PAGE, -1) if not is_taken[page]]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is exactly one of free, owned and cached."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert NULL_PAGE not in free, "the null page is free"
        assert not self._contents[NULL_PAGE], "the null page is retained"
        assert self._refcounts[NULL_PAGE] == 0, "the null page is owned"
        for page in range(1, len(self._refcounts)):
            states = (page in free, self._refcounts[page] > 0, self.is_cached(page))
            assert sum(states) == 1, f"page {page} is in {sum(states)} states"
        cached = [page for page in self.retained if self._refcounts[page] == 0]
        copied = sum(self.is_copied(page) for page in cached)
        assert self._num_cached == len(cached), "cached pages do not add up"
        assert self._num_copied == copied, "copies do not add up"
        assert 0 <= self._num_reserved <= self.num_free + self._num_cached, "too many are reserved"

    def _take_states(self, refcounts: np.ndarray, contents: np.ndarray) -> None:
        """Store references and contents of every page, as views with fast access to one element."""
        self._refcounts, self._contents = refcounts.data, contents.data


def _check_size(num_pages: int) -> None:
    if num_pages < MIN_PAGES:
        raise ValueError(f"num_pages={num_pages}: need the null page and at least one more")


@final
class HostPool:
    """Counts which pages of the host's KV memory are allocated; each has one owner."""

    def __init__(self, num_pages: int):
        self._is_allocated = [False] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_pages(self) -> int:
        return len(self._is_allocated)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_allocated(self, page: int) -> bool:
        return self._is_allocated[page]

    def allocate(self, count: int) -> tuple[int, ...]:
        """Allocate `count` pages; raise ValueError if fewer are free."""
        if count > len(self._free):
            raise ValueError(f"{count} host pages wanted, {len(self._free)} free")
        pages = tuple(self._free.pop() for _ in range(count))
        for page in pages:
            self._is_allocated[page] = True
        return pages

    def close(self) -> None:
        assert self.num_free == self.num_pages, "host pages are allocated"
        self._is_allocated, self._free = [], []

    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            if not self._is_allocated[page]:
                raise ValueError(f"host page {page} is not allocated and cannot be freed")
            self._is_allocated[page] = False
            self._free.append(page)


def fewest_moves(owned: Collection[int], num_pages: int) -> list[tuple[int, int]]:
    """Return (from, to) of every owned page that is not in a pool of `num_pages`.

    Pages at or above the new end move once, in order, to the lowest page below it that is not
    owned. No other page moves. (Flover's memory shuffle, Algorithm 3, searches the window that
    already holds the most; here the window is given, and begins after the null page.)

    Raises:
      ValueError: the pool has too few pages besides the null page.
    """
    if len(owned) > num_pages - 1:
        raise ValueError(f"{len(owned)} owned pages do not fit into {num_pages - 1}")
    kept = {page for page in owned if page < num_pages}
    holes = (page for page in range(NULL_PAGE + 1, num_pages) if page not in kept)
    strays = sorted(page for page in owned if page >= num_pages)
    return list(zip(strays, holes, strict=False))


def page_sources(old_num_pages: int, num_pages: int, moves: Moves) -> np.ndarray:
    """Return the old page that each page copies, int32 [num_pages]; the null page for new pages."""
    source = np.arange(num_pages, dtype=np.int32)
    source[old_num_pages:] = NULL_PAGE
    for old, new in moves:
        source[new] = old
    return source


def page_targets(old_num_pages: int, num_pages: int, moves: Moves) -> np.ndarray:
    """Return where each page went, int32 [old_num_pages]; the null page for those that are gone."""
    target = np.arange(old_num_pages, dtype=np.int32)
    target[num_pages:] = NULL_PAGE
    for old, new in moves:
        target[old] = new
    return target


@final
class PageTable:
    """Maps a sequence's positions to pages: position p is in `pages[p // page_size]`.

    The reservation is the number of pages that the sequence owns or may still allocate. `reserve`
    raises it, `allocate` uses it, `trim` gives pages back to it, `close` ends it.

    Attributes:
      max_end: no plan may compute a position from here on.
    """

    max_end = sys.maxsize

    def __init__(self, pool: PagePool, page_size: int):
        self._pool = pool
        self._page_size = page_size
        self._pages = _array()
        self._num_unallocated = 0

    @property
    def pages(self) -> tuple[int, ...]:
        return tuple(self._pages)

    def page(self, index: int) -> int:
        """Return one entry of `pages`, without a copy of the whole list."""
        return self._pages[index]

    def entries(self, num_tokens: int = sys.maxsize) -> list[tuple[int, int]]:
        """Return (index, page) of the owned pages of the first `num_tokens` tokens, or of all."""
        return list(enumerate(self._pages[: self.pages_for(num_tokens)]))

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    @property
    def num_tokens(self) -> int:
        return len(self._pages) * self._page_size

    @property
    def reservation(self) -> int:
        return len(self._pages) + self._num_unallocated

    @property
    def num_reserved_tokens(self) -> int:
        return self.reservation * self._page_size

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def num_missing(self, num_tokens: int) -> int:
        """Return how many pages beyond the reservation `num_tokens` would take."""
        return max(0, -(-num_tokens // self._page_size) - len(self._pages) - self._num_unallocated)

    def reserve(self, num_tokens: int) -> bool:
        """Raise the reservation to `num_tokens` tokens; False, unchanged, if the pool cannot."""
        missing = self.num_missing(num_tokens)
        if not self._pool.reserve(missing):
            return False
        self._num_unallocated += missing
        return True

    def allocate(self, num_tokens: int) -> list[tuple[int, int]]:
        """Own pages for `num_tokens` tokens, all reserved before; return the new (index, page)."""
        count = self.pages_for(num_tokens) - len(self._pages)
        if count <= 0:
            return []
        if count > self._num_unallocated:
            raise ValueError(
                f"{count} pages wanted, {self._num_unallocated} reserved; reserve first"
            )
        self._num_unallocated -= count
        first = len(self._pages)
        self._pages.extend(self._pool.allocate(count))
        return list(enumerate(self._pages[first:], first))

    def trim(self, num_tokens: int) -> None:
        """Free the pages beyond those for `num_tokens` tokens; the reservation stays."""
        count = len(self._pages) - self.pages_for(num_tokens)
        if count > 0:
            self._pool.free(self._pages[-count:])
            del self._pages[-count:]
            self._pool.reserve(count)
            self._num_unallocated += count

    def begin(self, num_tokens: int, shared: Mapping[int, int], num_pages: int) -> bool:
        """Reserve `num_tokens` tokens for this empty table; own the first `num_pages` pages.

        Return False, unchanged, if the pool has too few pages. `shared` maps indices in the table,
        below `num_pages` and within `num_tokens` tokens, to pages, owned or cached, with the
        contents that belong there. No sequence may write to a shared page.
        """
        if self._pages or self._num_unallocated:
            raise ValueError("only an empty page table can begin with shared pages")
        missing = self.pages_for(num_tokens) - len(shared)
        num_cached = sum(self._pool.is_cached(page) for page in shared.values())
        if missing + num_cached > self._pool.num_available:
            return False
        self._pool.lock(shared.values())
        self._pool.reserve(missing)
        allocated = iter(self._pool.allocate(num_pages - len(shared)))
        self._pages = _array(
            shared[i] if i in shared else next(allocated) for i in range(num_pages)
        )
        self._num_unallocated = missing - (num_pages - len(shared))
        return True

    def relocate(self, targets: Mapping[int, int]) -> None:
        """Follow the moves of `PagePool.resize`; pages that are not in `targets` stayed."""
        self._pages = _array(targets.get(page, page) for page in self._pages)

    def close(self) -> None:
        """Free every page and the reservation; the empty table can be used again."""
        self._pool.free_all(self._pages)
        self._pool.unreserve(self._num_unallocated)
        self._pages = _array()
        self._num_unallocated = 0


def _array(pages: Iterable[int] = ()) -> array[int]:
    return array("i", pages)
