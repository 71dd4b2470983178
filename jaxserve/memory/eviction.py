"""What a cached page is worth, and which is evicted first: the one of the lowest value."""

from __future__ import annotations

import bisect
import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, Protocol, Self, TypeAlias, final

from jaxserve.memory.cached_page import Branch, BranchPages, CachedPage

# The least time between two events, since values divide by it.
_MOMENT_S = 1e-6
# The counts before anything was observed.
_PRIOR_BACK, _PRIOR_GONE = 8.0, 16.0
# Pages after which the older half counts no more than the newer one.
_WINDOW = 4096.0
# Pages that are considered before one step while most are declined.
_FEW = 4
# Minimum number of stale entries before they are removed from the order.
_MANY_OLD = 64
# Conversations that rested most recently, which are ranked before all others.
_NUM_RESTED = 64
# What has one place in the order: a conversation, or a page that several conversations share.
_Unit: TypeAlias = Branch | CachedPage
# (rank, number, page, its uses, its unit, the unit's uses)
_Entry: TypeAlias = tuple[tuple[float, int], int, CachedPage, int, _Unit, int]


@final
@dataclass(frozen=True)
class RecomputeCost:
    """Cost(l) of recomputing a page after a context of l tokens (thesis, eq. 3.5 and 3.6).

    It is linear between and beyond two or more `points` (context, seconds), rising powers of two.
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def analytic(cls, *, attention: float, other: float, longest: int) -> Self:
        """Return the cost from a token's work: `attention` for each position seen, and `other`."""
        return cls.profiled(lambda context: attention * context + other, longest)

    @classmethod
    def profiled(cls, seconds: Callable[[int], float], longest: int) -> Self:
        """Return the cost from `seconds` at the powers of two up to the longest context."""
        contexts = [2**i for i in range(1 + max(1, math.ceil(math.log2(max(longest, 2)))))]
        return cls(tuple((context, seconds(context)) for context in contexts))

    def __call__(self, context: int) -> float:
        points = self.points
        above = bisect.bisect_left(points, (context,))
        above = min(max(above, 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[above - 1], points[above]
        return y0 + (y1 - y0) * (context - x0) / (x1 - x0)


class Eviction(Protocol):
    def value(self, cost_s: float, last_active_s: Sequence[float], now_s: float) -> float:
        """Return the value of a page.

        Pages are ranked in turns (`Ranking`), so that values taken at different moments are
        compared. The comparison is exact if the value does not depend on `now_s`.

        Args:
          cost_s: seconds to recompute it.
          last_active_s: when each conversation that it belongs to was last active; at least one.
        """
        ...


@final
@dataclass(frozen=True)
class LRU:
    """The most recently used page is worth most, by the time of its last use."""

    def value(self, cost_s: float, last_active_s: Sequence[float], now_s: float) -> float:
        return max(last_active_s)


@final
@dataclass(frozen=True)
class CostOverTime:
    """Cost(s, l) / T, summed over all conversations that share the page (thesis, eq. 3.4).

    It falls with time, so a page that was ranked long ago counts for more than it is worth now.
    Half of the victims have not the very lowest value; theirs is 2.3 % higher on average, and
    exact victims saved nothing (`docs/results/conversations_cache.md`).
    """

    def value(self, cost_s: float, last_active_s: Sequence[float], now_s: float) -> float:
        value = 0.0
        for each in last_active_s:
            value += cost_s / (now_s - each + _MOMENT_S)
        return value


@final
class ReuseRate:
    """The recent share of pages that are requested again after they left the device.

    A page counts as gone when it is decided whether to copy it to the host, whatever the decision.
    It counts as back when a sequence begins with it from a tier below the device, or would have if
    it had not been evicted. Pages that are certain to come back are not counted.
    """

    def __init__(self) -> None:
        self._gone, self._back = _PRIOR_GONE, _PRIOR_BACK

    def gone(self) -> None:
        self._gone += 1.0
        if self._gone > _WINDOW:
            self._gone /= 2.0
            self._back /= 2.0

    def back(self, num_pages: int) -> None:
        self._back += num_pages

    @property
    def chance(self) -> float:
        """The probability that a page that leaves now comes back."""
        return min(1.0, self._back / self._gone)


@final
class PageValues:
    """Values pages by their recompute cost and by when they were used.

    Args:
      eviction: gives the value; pages of the lowest value are evicted first.
      cost: of recomputing a page after a context.
      copy_s: seconds to copy a page to the host, and again to copy it back.
      learns_reuse: copy a page only if the expected saving, at the recent rate of reuse (`reuse`),
        is worth the copy. Otherwise pages are assumed to come back.
    """

    def __init__(
        self,
        page_size: int,
        eviction: Eviction,
        cost: RecomputeCost,
        now: Callable[[], float],
        copy_s: float,
        *,
        learns_reuse: bool = False,
    ):
        self.reuse = ReuseRate()
        self._learns_reuse = learns_reuse
        self._page_size = page_size
        self._eviction = eviction
        self._cost = cost
        self._now = now
        self._copy_s = copy_s
        # Indexed by the page's position in its sequence.
        self._costs_s: dict[int, float] = {}

    def value_by(self, cost: RecomputeCost) -> None:
        self._cost = cost
        self._costs_s.clear()

    def copy_by(self, copy_s: float) -> None:
        self._copy_s = copy_s

    def value(self, page: CachedPage) -> float:
        branches = page.branches
        if len(branches) > 1:
            # The last active time of all if none counts any longer.
            branches = [each for each in branches if each.counts] or branches[-1:]
        active = [branch.last_active_s for branch in branches]
        return self._eviction.value(self._cost_s(page), active, self._now())

    def rank(self, page: CachedPage) -> tuple[float, int]:
        return self.value(page), page.index

    def is_worth_copying(self, page: CachedPage) -> bool:
        saved_s = self._cost_s(page) - self._copy_s
        if not self._learns_reuse or any(branch.returns for branch in page.branches):
            return self._copy_s <= saved_s
        if page.count_once():
            self.reuse.gone()
        return self._copy_s <= self.reuse.chance * saved_s

    def most_to_look_at(self, num_pages: int) -> int:
        """Return how many of these pages to consider before one step: few if most are declined."""
        saved_s = self._cost(self._page_size) - self._copy_s
        pays = not self._learns_reuse or self._copy_s <= self.reuse.chance * saved_s
        return num_pages if pays else min(num_pages, _FEW)

    def _cost_s(self, page: CachedPage) -> float:
        cost_s = self._costs_s.get(page.index)
        if cost_s is None:
            cost_s = self._costs_s[page.index] = self._cost((page.index + 1) * self._page_size)
        return cost_s


@final
class Ranking:
    """Pages by value, the lowest first.

    A later page of a conversation costs more to compute and was used when the first one was, so a
    conversation is ranked by the first of its pages that may go, and then by the next. Pages that
    several conversations share have values of their own.

    Values change with time alone, too. So each call ranks one conversation again, in turns, and
    only the first call looks at all of a large pool. What was used since it was ranked is skipped
    until its next turn. If nothing ranked is left, conversations that rest are ranked first, and
    all others only if that finds nothing.

    Args:
      branches: every conversation with pages; those without any are removed.
      line: which pages of a conversation may go. Awaited conversations, and on the device running
        and held ones, are considered only if no other is found.
      keeps: whether no page of a conversation may go at present.
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
        self._spares_active = line != "on_host"
        # A heap. An entry counts if its number is the newest of its unit.
        self._order: list[_Entry] = []
        self._newest: dict[_Unit, int] = {}
        self._num_entries = 0
        # Conversations to rank next.
        self._turns: deque[_Unit] = deque()
        self._rested: deque[Branch] = deque(maxlen=_NUM_RESTED)

    def has_rested(self, branch: Branch) -> None:
        """Record that the pages of a conversation may go from now on."""
        self._rested.append(branch)

    def lowest(self) -> CachedPage | None:
        """Return and unrank the page of the lowest value that may go, or None."""
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
        return branch.is_awaited or (self._spares_active and (branch.is_running or branch.is_held))

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
        line: BranchPages = self._line(branch)
        page = line.first(index, self._may_go)
        if page is not None:
            self._push(page, branch)

    def _push(self, page: CachedPage, unit: _Unit) -> None:
        self._num_entries += 1
        self._newest[unit] = self._num_entries
        entry = self._rank(page), self._num_entries, page, page.uses, unit, unit.num_uses
        heapq.heappush(self._order, entry)
