"""A time budget for background work: a token bucket of seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final


@final
@dataclass(frozen=True)
class Budget:
    """A budget of seconds that grows by a share of the time that passes.

    The caller passes times; this class reads no clock. If no work costs more than was passed to
    `wait_s`, the time spent since `at_s` is at most `share` of the time passed. Time spent beyond
    that is a debt, which delays the next work.

    Attributes:
      share: earned seconds per second, over 0 and at most 1.
      at_s: time at which the budget was `level_s`.
      level_s: seconds available at `at_s`; negative is a debt.
      most_s: maximum of the budget, except for a single piece of work that costs more.
    """

    share: float
    at_s: float
    level_s: float = 0.0
    most_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share={self.share} is not allowed; pass a share over 0, at most 1")

    def wait_s(self, now_s: float, cost_s: float) -> float:
        """Return the seconds from `now_s` until work of this cost may begin."""
        return max(0.0, (cost_s - self._level_s(now_s, cost_s)) / self.share)

    def spent(self, begin_s: float, cost_s: float) -> Budget:
        """Return the budget after work that began at `begin_s` and took `cost_s`."""
        level_s = self._level_s(begin_s, cost_s) - cost_s
        return replace(self, at_s=begin_s, level_s=level_s)

    def _level_s(self, now_s: float, cost_s: float) -> float:
        earned_s = self.share * max(0.0, now_s - self.at_s)
        return min(max(self.most_s, cost_s), self.level_s + earned_s)
