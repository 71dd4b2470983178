"""How much time may be spent beside the real work: a token bucket of seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final


@final
@dataclass(frozen=True)
class Budget:
    """Seconds to spend, which come in as a share of the time that passes.

    What is asked and answered here are numbers: the clock is the caller's. Whoever never spends
    more than was announced to `wait_s` has spent at most `share` of all time since `at_s`; what
    was spent beyond it is waited for before anything else.

    Attributes:
      share: of the time that passes, over 0 and at most 1.
      at_s: the time at which there were `level_s` to spend; under 0 is a debt.
      most_s: more is not saved up, except for one thing that costs more.
    """

    share: float
    at_s: float
    level_s: float = 0.0
    most_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share={self.share}: give a share over 0, at most 1")

    def wait_s(self, now_s: float, cost_s: float) -> float:
        """Seconds from now until something of this cost may begin; 0 if it may now."""
        return max(0.0, (cost_s - self._level_s(now_s, cost_s)) / self.share)

    def spent(self, begin_s: float, cost_s: float) -> Budget:
        """What is left after something that began then and took this long."""
        level_s = self._level_s(begin_s, cost_s) - cost_s
        return replace(self, at_s=begin_s, level_s=level_s)

    def _level_s(self, now_s: float, cost_s: float) -> float:
        earned_s = self.share * max(0.0, now_s - self.at_s)
        return min(max(self.most_s, cost_s), self.level_s + earned_s)
