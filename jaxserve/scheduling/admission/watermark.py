"""Headroom of a constant number of pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import final

from jaxserve.scheduling.sequence import Sequence


@final
class Watermark:
    """Leaves `num_pages` pages available, except for the first sequence that runs.

    Args:
      is_idle: whether no sequence runs.
    """

    def __init__(self, num_pages: int, *, is_idle: bool = False):
        self._num_pages = num_pages
        self._is_idle = is_idle

    def pages(self, sequence: Sequence, following: Callable[[], Iterable[Sequence]] = tuple) -> int:
        """See `Headroom`."""
        return 0 if self._is_idle else self._num_pages

    def admitted(self, sequence: Sequence) -> None:
        """See `Headroom`."""
        self._is_idle = False

    def advanced(self) -> None:
        """See `Headroom`."""
