"""Places for pages on the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final


@final
class HostPool:
    """Counts which page of the host's KV memory is allocated; each has one owner."""

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
        """Return `count` free pages, which are allocated from here on.

        Raises:
          ValueError: fewer are free.
        """
        if count > len(self._free):
            raise ValueError(f"{count} host pages wanted, {len(self._free)} free")
        pages = tuple(self._free.pop() for _ in range(count))
        for page in pages:
            self._is_allocated[page] = True
        return pages

    def close(self) -> None:
        """Have no pages from here on; none may be allocated."""
        assert self.num_free == self.num_pages, "host pages are allocated"
        self._is_allocated, self._free = [], []

    def free(self, pages: Iterable[int]) -> None:
        """Give allocated pages back."""
        for page in pages:
            if not self._is_allocated[page]:
                raise ValueError(f"host page {page} is not allocated and cannot be freed")
            self._is_allocated[page] = False
            self._free.append(page)
