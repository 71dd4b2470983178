"""What a cached page is worth: the page of the lowest value is evicted first."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, final

# Two events of one moment are this far apart, for what divides by it.
_MOMENT_S = 1e-6


@final
@dataclass(frozen=True)
class RecomputeCost:
    """Cost(l) of computing a page anew after a context of l tokens (thesis, eq. 3.5 and 3.6).

    Attributes:
      points: (context, seconds) at contexts that are powers of two, increasing; at least two.
        Between and beyond them the cost is on a straight line.
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def analytic(cls, *, attention: float, other: float, longest: int) -> Self:
        """From the work of a token: `attention` for each position it sees, and `other` beside."""
        return cls.profiled(lambda context: attention * context + other, longest)

    @classmethod
    def profiled(cls, seconds: Callable[[int], float], longest: int) -> Self:
        """`seconds` at the powers of two up to the longest context."""
        contexts = [2**i for i in range(1 + max(1, math.ceil(math.log2(max(longest, 2)))))]
        return cls(tuple((context, seconds(context)) for context in contexts))

    def __call__(self, context: int) -> float:
        points = self.points
        above = bisect.bisect_left(points, (context,))
        above = min(max(above, 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[above - 1], points[above]
        return y0 + (y1 - y0) * (context - x0) / (x1 - x0)


class Eviction(Protocol):
    """How much a cached page is worth."""

    def value(self, cost_s: float, last_active_s: Sequence[float], now_s: float) -> float:
        """Return the value of a page.

        Args:
          cost_s: seconds to compute it anew.
          last_active_s: when each conversation that it belongs to was last active; at least one.
        """
        ...


@final
@dataclass(frozen=True)
class LRU:
    """The page that was used last is worth most."""

    def value(self, cost_s: float, last_active_s: Sequence[float], now_s: float) -> float:
        return max(last_active_s) - now_s


@final
@dataclass(frozen=True)
class CostOverTime:
    """Cost(s, l) / T, added up over all conversations that share the page (thesis, eq. 3.4)."""

    def value(self, cost_s: float, last_active_s: Sequence[float], now_s: float) -> float:
        value = 0.0
        for each in last_active_s:
            value += cost_s / (now_s - each + _MOMENT_S)
        return value
