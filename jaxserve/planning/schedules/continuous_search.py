"""The search for the number of sequences with the highest score, in few simulations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from jaxserve.planning.schedules.candidate import Score
from jaxserve.planning.schedules.continuous_limits import ContinuousLimits
from jaxserve.planning.schedules.estimates import Best, Estimates, LatencyBounds

# Times a bound from which on a latency misses it for more sequences, too. Simulations are short, so
# that a latency may be a little lower with more sequences.
_FAR = 1.15
# Interpolations between two sizes, after which what is left is halved.
_MOST_INTERPOLATED = 2


@final
class SizeSearch:
    """The numbers of sequences that were simulated so far, and their scores.

    Args:
      simulated: returns the figures of a number of sequences.
      limits: figures that simulations do not beat.
      bounds: those that the score has, by which sizes are interpolated; none for other scores.

    Attributes:
      scores: by number of sequences.
    """

    def __init__(
        self,
        simulated: Callable[[int], Estimates],
        limits: ContinuousLimits,
        score: Score,
        bounds: LatencyBounds,
    ):
        self.scores: dict[int, float] = {}
        self._simulated = simulated
        self._limits = limits
        self._score = score
        self._bounds = bounds

    @property
    def best(self) -> int | None:
        """The number of sequences with the highest score, if that is above 0."""
        best = max(self.scores, key=lambda size: self.scores[size], default=None)
        return best if best is not None and self.scores[best] > 0 else None

    def score_of(self, size: int) -> float:
        if size not in self.scores:
            self.scores[size] = float(self._score(self._simulated(size)))
        return self.scores[size]

    def may_gain(self, size: int) -> bool:
        """Return whether step times alone do not say that a size has no higher score."""
        most = max(self.scores.values(), default=0.0)
        return float(self._score(self._limits.of(size))) > most

    def ascend(self, sizes: Sequence[int]) -> None:
        """Simulate sizes, smallest first, until larger ones keep the bounds no more."""
        for size in filter(self.may_gain, sizes):
            if self.score_of(size):
                continue
            if self.best is not None or self._used(self._simulated(size)) > _FAR:
                return

    def fill(self, least: int) -> None:
        """Look for larger sizes that keep the bounds below each one that does not.

        Args:
          least: a size that is taken to keep them.
        """
        tried = sorted({least, *self.scores})
        for low, high in zip(tried, tried[1:], strict=False):
            if (low == least or self.scores[low]) and not self.scores[high]:
                if self._may_serve_more(high):
                    self._fill_between(low, high)

    def _fill_between(self, low: int, high: int) -> None:
        num_interpolated = 0
        while high - low > 1:
            middle = (low + high) // 2
            crossing = self._crossing(low, high)
            if crossing is not None and num_interpolated < _MOST_INTERPOLATED:
                if crossing <= low:
                    return
                middle = min(crossing, high - 1)
                num_interpolated += 1
            if self.may_gain(middle) and self.score_of(middle):
                low = middle
            else:
                high = middle

    def _crossing(self, low: int, high: int) -> int | None:
        """Return the largest size that keeps the bounds if latencies rise evenly up to `high`.

        They rise from `low` on, or, where that was not simulated or has a smaller compiled size,
        from the limit, with which no prompt comes between two tokens. Real latencies rise fast at
        first and then slower, so no larger size is expected to keep the bounds. None where
        latencies do not rise, or nothing is to be kept.
        """
        begin, end = 0, self._used(self._simulated(high))
        used = self._used(self._limits.of(low + 1))
        if low in self.scores and used <= self._used(self._limits.of(low)):
            begin, used = low, self._used(self._simulated(low))
        if not used < 1 < end:
            return None
        return begin + int((1 - used) / (end - used) * (high - begin))

    def _used(self, figures: Estimates | Best) -> float:
        """Return which multiple of a bound is needed, of the bound that is missed most."""
        shares = [float(getattr(figures, name)) / s for name, s in self._bounds.finite().items()]
        return max([*shares, float(figures.own_share)])

    def _may_serve_more(self, high: int) -> bool:
        """Return whether fewer sequences than `high` may serve more than the best so far."""
        if self.best is None:
            return True
        most, best = self._simulated(high).throughput, self._simulated(self.best).throughput
        return bool(most > best)
