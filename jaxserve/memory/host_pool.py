"""Places for pages on the host: where the KV of preempted sequences waits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final


@final
class HostPool:
    """Counts which page of the host's KV memory is taken; each by one sequence."""

    def __init__(self, num_pages: int):
        self._is_taken = [False] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_pages(self) -> int:
        return len(self._is_taken)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_taken(self, page: int) -> bool:
        return self._is_taken[page]

    def take(self, count: int) -> tuple[int, ...]:
        """`count` free pages.

        Raises:
          ValueError: fewer are free.
        """
        if count > len(self._free):
            raise ValueError(f"{count} host pages wanted, {len(self._free)} free")
        pages = tuple(self._free.pop() for _ in range(count))
        for page in pages:
            self._is_taken[page] = True
        return pages

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            if not self._is_taken[page]:
                raise ValueError(f"host page {page} is not taken and cannot be released")
            self._is_taken[page] = False
            self._free.append(page)
