"""Cached pages in the order in which they are evicted."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Literal, TypeAlias, final

from jaxserve.memory.cached_page import Branch, CachedPage, Line

# Entries that count no more, at least, before they are removed from the order.
_MANY_OLD = 64
# Conversations that came to rest, the newest ones, that are ranked before all others are.
_NUM_RESTED = 64
# What has one place in the order: a conversation, or a page that several conversations share.
_Unit: TypeAlias = Branch | CachedPage
# (rank, number, page, its uses, its unit, the uses of that)
_Entry: TypeAlias = tuple[tuple[float, int], int, CachedPage, int, _Unit, int]


@final
class Ranking:
    """Pages by value, the lowest first.

    A later page of a conversation costs more to compute and was used when the first one was, so a
    conversation stands in the order with the first of its pages that may go, and then with the
    next. Pages that several conversations share have values of their own.

    Values change by time alone, too. So each call ranks one conversation anew, in turns, and no
    call but the first looks at all of a large pool. What was used since it was ranked is passed
    over until its next turn. Where nothing ranked is left, conversations that have come to rest
    are ranked first, and all others only if that brings nothing.

    Args:
      branches: every conversation with pages; those without any are removed.
      line: the pages of a conversation among which those are that may go. Those of a conversation
        that is awaited or, on the device, runs, are looked at only where no other is found.
      may_go: whether a page is one of those that are ranked.
      rank: the sort key.
      keeps: whether no page of a conversation may go at present; then none is looked at.
    """

    def __init__(
        self,
        branches: dict[Branch, None],
        line: Literal["on_device", "on_host", "uncopied"],
        may_go: Callable[[CachedPage], bool],
        rank: Callable[[CachedPage], tuple[float, int]],
        *,
        keeps: Callable[[Branch], bool] = lambda _: False,
    ):
        self._branches = branches
        self._line = attrgetter(line)
        self._may_go = may_go
        self._rank = rank
        self._keeps = keeps
        self._spares_running = line != "on_host"
        # A heap. An entry counts if its number is the newest of its unit.
        self._order: list[_Entry] = []
        self._newest: dict[_Unit, int] = {}
        self._num_entries = 0
        # Those whose turn is next.
        self._turns: deque[_Unit] = deque()
        self._rested: deque[Branch] = deque(maxlen=_NUM_RESTED)

    def has_rested(self, branch: Branch) -> None:
        """Take note that the pages of a conversation may go from now on."""
        self._rested.append(branch)

    def lowest(self) -> CachedPage | None:
        """Return the page of the lowest value that may go, or None; it is not ranked any more."""
        page = self._next()
        if page is None and self._rested:
            while self._rested:
                self._rank_unit(self._rested.popleft(), skips=True)
            page = self._next()
        if page is None:
            self._rank_all(skips=True)
            page = self._next()
        if page is None:
            self._rank_all(skips=False)
            page = self._next()
        self._rank_next(skips=True)
        if len(self._order) > 2 * len(self._newest) + _MANY_OLD:
            self._remove_old()
        return page

    def put_back(self, page: CachedPage) -> None:
        """Rank it again; it stays the lowest."""
        self._push(page, page)

    def _rank_all(self, *, skips: bool) -> None:
        self._turns.clear()
        self._rested.clear()
        self._rank_next(skips=skips)
        while self._turns:
            self._rank_next(skips=skips)

    def _rank_next(self, *, skips: bool) -> None:
        if not self._turns:
            self._turns.extend(self._branches)
        if self._turns:
            self._rank_unit(self._turns.popleft(), skips=skips)

    def _rank_unit(self, unit: _Unit, *, skips: bool) -> None:
        if isinstance(unit, CachedPage):
            if self._may_go(unit):
                self._push(unit, unit)
        elif unit.is_empty:
            self._branches.pop(unit, None)
            self._newest.pop(unit, None)
        elif not (self._keeps(unit) or (skips and self._is_spared(unit))):
            self._push_first_of(unit, 0)
            self._turns.extend(unit.shared_pages())

    def _is_spared(self, branch: Branch) -> bool:
        return branch.is_awaited or (branch.is_running and self._spares_running)

    def _remove_old(self) -> None:
        newest = self._newest
        self._order = [
            each for each in self._order if newest.get(each[4]) == each[1] and each[2].is_resident
        ]
        heapq.heapify(self._order)
        self._newest = {unit: number for _, number, _, _, unit, _ in self._order}

    def _next(self) -> CachedPage | None:
        while self._order:
            _, number, page, uses, unit, unit_uses = heapq.heappop(self._order)
            if self._newest.get(unit) != number:
                continue
            del self._newest[unit]
            if isinstance(unit, Branch):
                if unit.num_uses != unit_uses:
                    continue
                self._push_first_of(unit, page.index + 1)
            if page.uses == uses and self._may_go(page):
                return page
        return None

    def _push_first_of(self, branch: Branch, index: int) -> None:
        """Have a conversation stand in the order with the first page from `index` on."""
        line: Line = self._line(branch)
        page = line.first(index, self._may_go)
        if page is not None:
            self._push(page, branch)

    def _push(self, page: CachedPage, unit: _Unit) -> None:
        self._num_entries += 1
        self._newest[unit] = self._num_entries
        entry = self._rank(page), self._num_entries, page, page.uses, unit, unit.num_uses
        heapq.heappush(self._order, entry)
