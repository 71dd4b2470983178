"""Copies of pages from the host to the device that no plan has made yet."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import final


@final
class IncomingCopies:
    """Which page of the host is to be copied to which page of the device, the first ones first.

    Attributes:
      num_taken: copies that plans have taken.
    """

    def __init__(self) -> None:
        self.num_taken = 0
        self._host_pages: dict[int, int] = {}  # by their page of the device

    def __len__(self) -> int:
        return len(self._host_pages)

    def __contains__(self, device_page: int | None) -> bool:
        return device_page in self._host_pages

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (device page, host page)."""
        return iter(self._host_pages.items())

    def add(self, host_page: int, device_page: int) -> None:
        """Have a page copied, after all others."""
        self._host_pages[device_page] = host_page

    def drop(self, device_page: int) -> None:
        """Have nothing copied to a page of the device."""
        self._host_pages.pop(device_page, None)

    def last_of(self, device_pages: Collection[int]) -> int | None:
        """Return the one of these pages that is copied after the others; None if none is."""
        wanted = set(device_pages)
        return next((page for page in reversed(self._host_pages) if page in wanted), None)

    def take(self, most: int | None) -> tuple[tuple[int, int], ...]:
        """Return (host page, device page) of the first copies, which are here no more.

        Args:
          most: as many as these; None for all of them.
        """
        pages = [*itertools.islice(self._host_pages, most)]
        copies = tuple((self._host_pages.pop(page), page) for page in pages)
        self.num_taken += len(copies)
        return copies

    def relocate(self, targets: Mapping[int, int]) -> None:
        """Follow pages of the device that move."""
        moved = {targets.get(page, page): host for page, host in self._host_pages.items()}
        self._host_pages = moved
