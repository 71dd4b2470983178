"""The pages of one sequence, and its reservation."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import final

from jaxserve.memory.page_pool import PagePool


@final
class PageTable:
    """Maps a sequence's positions to pages: position p is in `pages[p // page_size]`.

    The reservation is the number of pages that the sequence owns or may still allocate. `reserve`
    raises it, `allocate` uses it, `trim` gives pages back to it, `close` ends it.
    """

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
