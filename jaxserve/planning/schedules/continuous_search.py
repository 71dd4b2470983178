"""The search for the number of sequences with the highest score, in few simulations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import final

import numpy as np

from jaxserve.planning.schedules.candidate import Score
from jaxserve.planning.schedules.continuous_limits import ContinuousLimits
from jaxserve.planning.schedules.estimates import Best, Estimates

# By which share expected latencies may be too long. Beside sizes that were simulated they are off
# by less.
_SLACK = 0.01
# By which share a score must be expected to be higher than the best for another simulation.
_GAIN = 0.01
# Prompts come between the tokens of others at this power of the number of sequences.
_GROWTH = 0.75
_LATENCIES = ("latency_s", "first_token_s", "token_s")


@final
class SizeSearch:
    """A search among numbers of sequences, which simulates those that are expected to be best.

    What is expected are the limits and costs of prompts. Engine time per answer is that of the
    limits, and that of a prompt. Latencies are those of the limits, and so much for each sequence
    that runs, since its prompts come between the tokens of others. Both are taken from the sizes
    that were simulated, and interpolated between them.

    Args:
      simulated: returns the figures of a number of sequences, each a scalar.
      limits: figures that simulations do not beat.
      sizes: numbers of sequences, increasing; at least one.

    Attributes:
      scores: by number of sequences, of those that were simulated.
    """

    def __init__(
        self,
        simulated: Callable[[int], Estimates],
        limits: ContinuousLimits,
        score: Score,
        sizes: range,
    ):
        self.scores: dict[int, float] = {}
        self._simulated = simulated
        self._score = score
        self._sizes = np.array(sizes)
        self._limits = limits.of(self._sizes)
        self._prompt_s = limits.prompt_s()

    @property
    def best(self) -> int | None:
        """The number of sequences with the highest score, if that is above 0."""
        best = max(self.scores, key=lambda size: self.scores[size], default=None)
        return best if best is not None and self.scores[best] > 0 else None

    def score_of(self, size: int) -> float:
        if size not in self.scores:
            self.scores[size] = float(self._score(self._simulated(size)))
        return self.scores[size]

    def run(self) -> None:
        """Simulate sizes until none is expected to have a higher score."""
        while (size := self._next()) is not None:
            self.score_of(size)

    def _next(self) -> int | None:
        most = max(self.scores.values(), default=0.0)
        may_gain = (self._score(self._limits) > most) & ~np.isin(self._sizes, list(self.scores))
        if not may_gain.any():
            return None
        expected = self._expected()
        scores = np.where(may_gain, self._score(expected), 0.0)
        first = int(np.argmax(scores))
        if scores[first] > most * (1 + _GAIN):
            return int(self._sizes[first])
        if self.scores:
            return None
        # A first guess is not enough to simulate none.
        return int(self._sizes[np.argmin(np.where(may_gain, expected.latency_s, np.inf))])

    def _expected(self) -> Best:
        """Return what the sizes are expected to do, [sizes] each, with latencies in favour."""
        sizes, limits = self._sizes, self._limits
        known = sorted(self.scores)
        figures = [self._simulated(size) for size in known]

        def beside(values: np.ndarray) -> list[tuple[Estimates, float]]:
            return list(zip(figures, values[np.searchsorted(sizes, known)], strict=True))

        def between(values: list[float], otherwise: float) -> np.ndarray:
            return np.interp(sizes, known, values) if known else np.full(len(sizes), otherwise)

        periods_s = [float(1 / f.throughput - p) for f, p in beside(1 / limits.throughput)]
        longer = {}
        for name in _LATENCIES:
            least, times = getattr(limits, name), sizes**_GROWTH
            each_s = [float(getattr(f, name) - s) for f, s in beside(least)]
            each_s = [s / n**_GROWTH for s, n in zip(each_s, known, strict=True)]
            longer[name] = (1 - _SLACK) * np.maximum(least, least + between(each_s, 0.0) * times)
        shares = [float(f.own_share / s) for f, s in beside(longer["token_s"])]
        own_share = (1 - _SLACK) * between(shares, 0.0) * longer["token_s"]
        periods_s = 1 / limits.throughput + between(periods_s, self._prompt_s)
        return replace(
            limits,
            throughput=1 / np.maximum(periods_s, 1e-12),
            own_share=own_share,
            **longer,
        )
