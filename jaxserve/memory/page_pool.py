"""The pool of KV pages: reference counts, promises, and contents that are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final

NULL_PAGE = 0
# The null page and one that somebody can own.
MIN_PAGES = 2


@final
class PagePool:
    """Counts who holds which page of the device's KV cache.

    A page is free, owned (reference count >= 1), or cached: held by nobody, but with contents that
    somebody may want again (`keep`). Page 0 is the null page: padding writes there and nobody owns
    it. A *promise* sets pages that are not owned aside without naming them, so that a reservation
    costs nothing until it is drawn; owned plus promised never exceeds the pool.

    Args:
      reclaim: asked for so many cached pages to be given up (`forget`), when too few are free.
    """

    def __init__(self, num_pages: int, reclaim: Callable[[int], None] | None = None):
        _check_size(num_pages)
        self._refcounts = [0] * num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._num_promised = 0
        # Page -> whether its contents lie elsewhere too.
        self._kept: dict[int, bool] = {}
        self._num_cached = 0
        self._num_copied = 0
        self._reclaim = reclaim

    @property
    def num_usable(self) -> int:
        """Pages that sequences can own: all but the null page."""
        return len(self._refcounts) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_copied(self) -> int:
        """Cached pages whose contents lie elsewhere too: giving them up loses nothing."""
        return self._num_copied

    @property
    def num_owned(self) -> int:
        return self.num_usable - self.num_free - self._num_cached

    @property
    def num_promised(self) -> int:
        return self._num_promised

    @property
    def num_available(self) -> int:
        """Free and cached pages that are promised to nobody."""
        return len(self._free) + self._num_cached - self._num_promised

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
        if count > len(self._free) and self._reclaim is not None:
            self._reclaim(count - len(self._free))
        self.withdraw(count)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refcounts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each of `pages`, which must be owned or cached."""
        for page in pages:
            if self._refcounts[page] < 1:
                if page not in self._kept:
                    raise ValueError(f"page {page} is free and cannot be shared")
                if self.num_available < 1:
                    raise ValueError(f"page {page} is promised and cannot be shared")
                self._count_cached(page, -1)
            self._refcounts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to each of `pages`; one without references becomes free or cached."""
        for page in pages:
            if self._refcounts[page] < 1:
                raise ValueError(f"page {page} is not owned and cannot be released")
            self._refcounts[page] -= 1
            if self._refcounts[page] == 0:
                if page in self._kept:
                    self._count_cached(page, 1)
                else:
                    self._free.append(page)

    # ---- contents that somebody may want again ----

    def keep(self, page: int, *, is_copied: bool = False) -> None:
        """Have an owned page be cached, and not free, once it is owned no more.

        Args:
          is_copied: its contents lie elsewhere too.
        """
        if self._refcounts[page] < 1 or page in self._kept:
            raise ValueError(f"page {page} is not owned, or kept already")
        self._kept[page] = is_copied

    def forget(self, page: int) -> None:
        """Nobody wants the contents of this kept page any more; if it is cached it is free now."""
        if self._refcounts[page] == 0:
            self._count_cached(page, -1)
            self._free.append(page)
        del self._kept[page]

    def mark_copied(self, page: int, is_copied: bool) -> None:
        """Say whether the contents of this kept page lie elsewhere too."""
        if self._kept[page] != is_copied and self._refcounts[page] == 0:
            self._num_copied += 1 if is_copied else -1
        self._kept[page] = is_copied

    def is_copied(self, page: int) -> bool:
        return self._kept[page]

    def is_cached(self, page: int) -> bool:
        return page in self._kept and self._refcounts[page] == 0

    def _count_cached(self, page: int, change: int) -> None:
        self._num_cached += change
        if self._kept[page]:
            self._num_copied += change

    # ---- all of them ----

    def refcount(self, page: int) -> int:
        return self._refcounts[page]

    @property
    def kept(self) -> set[int]:
        """Cached pages, and those that will be."""
        return set(self._kept)

    @property
    def held(self) -> list[int]:
        """Owned and cached pages."""
        return [page for page, count in enumerate(self._refcounts) if count or page in self._kept]

    def resize(self, num_pages: int, moves: Sequence[tuple[int, int]]) -> None:
        """Have `num_pages` pages from here on; held ones are where `moves` brought them.

        References and promises stay. Page tables have to follow (`PageTable.relocate`).

        Args:
          moves: (from, to) as `relocation.fewest_moves` gives.

        Raises:
          ValueError: what is owned and promised does not fit, or a held page would be lost;
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
        is_taken = [False] * num_pages
        kept: dict[int, bool] = {}
        for page in self.held:
            target = targets.get(page, page)
            if not NULL_PAGE < target < num_pages or is_taken[target]:
                raise ValueError(f"page {page} cannot go to {target}")
            is_taken[target] = True
            refcounts[target] = self._refcounts[page]
            if page in self._kept:
                kept[target] = self._kept[page]
        self._refcounts = refcounts
        self._kept = kept
        self._free = [page for page in range(num_pages - 1, NULL_PAGE, -1) if not is_taken[page]]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is exactly one of free, owned and cached."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert NULL_PAGE not in free | self._kept.keys(), "the null page is free or kept"
        assert self._refcounts[NULL_PAGE] == 0, "the null page is owned"
        for page in range(1, len(self._refcounts)):
            states = (page in free, self._refcounts[page] > 0, self.is_cached(page))
            assert sum(states) == 1, f"page {page} is in {sum(states)} states"
        cached = [page for page in self._kept if self._refcounts[page] == 0]
        assert self._num_cached == len(cached), "cached pages do not add up"
        assert self._num_copied == sum(self._kept[page] for page in cached), "copies do not add up"
        assert 0 <= self._num_promised <= self.num_free + self._num_cached, "too many are promised"


def _check_size(num_pages: int) -> None:
    if num_pages < MIN_PAGES:
        raise ValueError(f"num_pages={num_pages}: need the null page and at least one more")
