"""Lengths as distributions over buckets, and what is left of them after some tokens.

Within a bucket all lengths are taken as equally likely. After t tokens without an end, what was
shorter is ruled out and the rest renormalised: P(L | L > t). All is vectorised over sequences.
"""

from __future__ import annotations

from typing import final

import numpy as np

from predictor.buckets import LengthBuckets

# Under this much probability left, the prediction was wrong: nothing is known but the elapsed time.
_NOTHING_LEFT = 1e-6


@final
class LengthDistributions:
    """Predicted output lengths of sequences.

    Args:
      probabilities: float [sequences, buckets], rows that sum to 1. Rows with anything but finite
        numbers count as knowing nothing.
    """

    def __init__(self, buckets: LengthBuckets, probabilities: np.ndarray):
        given = np.asarray(probabilities, np.float64)
        if given.ndim != 2 or given.shape[1] != buckets.num:
            raise ValueError(f"probabilities{given.shape}: expected [sequences, {buckets.num}]")
        usable = np.isfinite(given).all(1) & (given >= 0).all(1) & (given.sum(1) > 0)
        given = np.where(usable[:, None], given, 1.0)
        self.buckets = buckets
        self.probabilities = given / given.sum(1, keepdims=True)
        edges = np.asarray(buckets.edges, np.float64)
        self._low, self._high = edges[:-1], edges[1:]

    def __len__(self) -> int:
        return len(self.probabilities)

    def after(self, elapsed: np.ndarray | int) -> np.ndarray:
        """P(bucket | longer than `elapsed`) [sequences, buckets]; `elapsed` int [sequences]."""
        return self._after(self._column(elapsed))[0]

    def expected_remaining(self, elapsed: np.ndarray | int = 0) -> np.ndarray:
        """E(L - t | L > t) in tokens [sequences]; 1 past the longest length."""
        t = self._column(elapsed)
        left, low = self._after(t)
        mean = (low + 1 + self._high) / 2
        return np.where(t[:, 0] >= self.buckets.max_length, 1.0, (left * (mean - t)).sum(1))

    def quantile(self, level: float | np.ndarray, elapsed: np.ndarray | int = 0) -> np.ndarray:
        """The shortest lengths that a share `level` of those over `elapsed` do not outgrow.

        int64 [sequences]; at least one token more than `elapsed`.
        """
        t = self._column(elapsed)
        left, low = self._after(t)
        reached = np.cumsum(left, axis=1)
        level = np.broadcast_to(np.asarray(level, np.float64), len(self))[:, None]
        bucket = np.argmax(reached >= level - 1e-12, axis=1)[:, None]
        # A level that rounding keeps from being reached is reached in the last bucket.
        bucket = np.where(reached[:, -1:] < level - 1e-12, self.buckets.num - 1, bucket)

        def at(array: np.ndarray) -> np.ndarray:
            return np.take_along_axis(np.broadcast_to(array, left.shape), bucket, 1)[:, 0]

        before, inside = at(reached) - at(left), at(left)
        share = np.clip((level[:, 0] - before) / np.where(inside == 0, 1.0, inside), 0.0, 1.0)
        length = np.ceil(at(low) + share * (at(self._high) - at(low)) - 1e-9)
        return np.maximum(length, t[:, 0] + 1).astype(np.int64)

    def survival(self, elapsed: np.ndarray | int, more: np.ndarray) -> np.ndarray:
        """P(L > t + m | L > t) [sequences, times] for `more` tokens m, float [times]."""
        t = self._column(elapsed)
        left, low = self._after(t)
        ends = (t + more)[:, None, :]
        width = np.maximum(self._high - low, 1e-9)[:, :, None]
        over = np.clip((self._high[:, None] - ends) / width, 0.0, 1.0)
        return (left[:, :, None] * over).sum(1)

    def remaining(self, elapsed: np.ndarray | int, buckets: LengthBuckets) -> np.ndarray:
        """P(L - t in bucket | L > t) [sequences, buckets], on buckets of what is left.

        What is over the longest of them counts as that.
        """
        alive = self.survival(elapsed, np.asarray(buckets.edges, np.float64))
        alive[:, 0], alive[:, -1] = 1.0, 0.0
        return -np.diff(alive, axis=1)

    def cdf(self, lengths: np.ndarray) -> np.ndarray:
        """P(L <= length) of each sequence's own length [sequences]."""
        return 1.0 - (self.probabilities * self._share_over(self._column(lengths))).sum(1)

    def _after(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What is left of each bucket, and where that begins [sequences, buckets]."""
        over = self._share_over(t)
        left = self.probabilities * over
        total = left.sum(1, keepdims=True)
        # A refuted prediction: all lengths that are left, equally likely.
        flat = over * (self._high - self._low)
        flat[:, -1] += flat.sum(1) == 0
        left = np.where(total < _NOTHING_LEFT, flat, left)
        low = np.minimum(np.maximum(self._low, t), self._high)
        return left / left.sum(1, keepdims=True), low

    def _share_over(self, t: np.ndarray) -> np.ndarray:
        """Share of each bucket's lengths that are over t."""
        return np.clip((self._high - t) / (self._high - self._low), 0.0, 1.0)

    def _column(self, values: np.ndarray | int) -> np.ndarray:
        return np.broadcast_to(np.asarray(values, np.float64), len(self))[:, None]
