"""How often pages are asked for again after they left the device."""

from __future__ import annotations

from typing import final

# What counts before anything was seen: so many of so many pages come back.
_PRIOR_BACK, _PRIOR_GONE = 8.0, 16.0
# Pages after which the older half counts no more than the newer one.
_WINDOW = 4096.0


@final
class ReuseRate:
    """The share of pages that are asked for again after they left the device, lately.

    A page counts as gone when it is decided whether it is copied to the host, whatever the
    decision. It counts as back when a sequence begins with it from a tier below the device, or
    would have if it had not been evicted. Pages that are sure to come back are not counted.
    """

    def __init__(self) -> None:
        self._gone, self._back = _PRIOR_GONE, _PRIOR_BACK

    def gone(self) -> None:
        """Count a page that leaves."""
        self._gone += 1.0
        if self._gone > _WINDOW:
            self._gone /= 2.0
            self._back /= 2.0

    def back(self, num_pages: int) -> None:
        """Count pages that were asked for again."""
        self._back += num_pages

    @property
    def chance(self) -> float:
        """The probability that a page that leaves now comes back."""
        return min(1.0, self._back / self._gone)
