"""The pool of KV pages: reference counts and promises."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

NULL_PAGE = 0
# The null page and one that somebody can own.
MIN_PAGES = 2


@final
class PagePool:
    """Counts who holds which page of the device's KV cache.

    A page is free or owned (reference count >= 1). Page 0 is the null page: padding writes there
    and nobody owns it. A *promise* sets a number of free pages aside without naming them, so that
    a reservation costs nothing until it is drawn; owned plus promised never exceeds the pool.
    """

    def __init__(self, num_pages: int):
        _check_size(num_pages)
        self._refcounts = [0] * num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._num_promised = 0

    @property
    def num_usable(self) -> int:
        """Pages that sequences can own: all but the null page."""
        return len(self._refcounts) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_owned(self) -> int:
        return self.num_usable - self.num_free

    @property
    def num_promised(self) -> int:
        return self._num_promised

    @property
    def num_available(self) -> int:
        """Free pages that are promised to nobody."""
        return len(self._free) - self._num_promised

    def promise(self, count: int) -> bool:
        """Set `count` pages aside; False, and nothing changes, if fewer are available."""
        if count > self.num_available:
            return False
        self._num_promised += count
        return True

    def withdraw(self, count: int) -> None:
        """Give back `count` promised pages that were never drawn."""
        if not 0 <= count <= self._num_promised:
            raise ValueError(f"cannot withdraw {count} of {self._num_promised} promised pages")
        self._num_promised -= count

    def draw(self, count: int) -> list[int]:
        """Turn `count` promised pages into owned ones, each with one reference."""
        self.withdraw(count)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refcounts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each of `pages`, which must be owned."""
        for page in pages:
            if self._refcounts[page] < 1:
                raise ValueError(f"page {page} is not owned and cannot be shared")
            self._refcounts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to each of `pages`; one without references becomes free."""
        for page in pages:
            if self._refcounts[page] < 1:
                raise ValueError(f"page {page} is not owned and cannot be released")
            self._refcounts[page] -= 1
            if self._refcounts[page] == 0:
                self._free.append(page)

    def refcount(self, page: int) -> int:
        return self._refcounts[page]

    @property
    def owned(self) -> list[int]:
        return [page for page, count in enumerate(self._refcounts) if count]

    def resize(self, num_pages: int, moves: Sequence[tuple[int, int]]) -> None:
        """Have `num_pages` pages from here on; owned ones are where `moves` brought them.

        References and promises stay. Page tables have to follow (`PageTable.relocate`).

        Args:
          moves: (from, to) as `relocation.fewest_moves` gives.

        Raises:
          ValueError: what is owned and promised does not fit, or an owned page would be lost;
            nothing has changed.
        """
        _check_size(num_pages)
        if self.num_owned + self._num_promised > num_pages - 1:
            raise ValueError(
                f"{self.num_owned} owned and {self._num_promised} promised pages do not fit into "
                f"{num_pages - 1}"
            )
        targets = dict(moves)
        refcounts = [0] * num_pages
        for page in self.owned:
            target = targets.get(page, page)
            if not NULL_PAGE < target < num_pages or refcounts[target]:
                raise ValueError(f"page {page} cannot go to {target}")
            refcounts[target] = self._refcounts[page]
        self._refcounts = refcounts
        self._free = [page for page in range(num_pages - 1, NULL_PAGE, -1) if not refcounts[page]]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is exactly one of free and owned."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert NULL_PAGE not in free, "the null page is in the free list"
        assert self._refcounts[NULL_PAGE] == 0, "the null page is owned"
        for page in range(1, len(self._refcounts)):
            assert (page in free) == (self._refcounts[page] == 0), f"page {page} is in two states"
        assert 0 <= self._num_promised <= len(self._free), "more pages promised than free"


def _check_size(num_pages: int) -> None:
    if num_pages < MIN_PAGES:
        raise ValueError(f"num_pages={num_pages}: need the null page and at least one more")
