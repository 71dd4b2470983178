"""Distributions of output lengths over buckets, and of remaining lengths after t tokens.

All lengths within a bucket are equally likely. After t tokens without an end, lengths up to t are
ruled out and the rest is renormalised: P(L | L > t). Everything is vectorised over sequences.
"""

from __future__ import annotations

import functools
from typing import Self, final

import numpy as np
from jaxtyping import Float, Int, Int64

from jaxserve.predictor.buckets import LengthBuckets

# With less probability left than this, the prediction counts as refuted.
_NOTHING_LEFT = 1e-6


@final
class LengthDistributions:
    """Predicted output lengths of sequences.

    Args:
      probabilities: float [sequences, buckets]; rows are normalised. A row that has negative or
        non-finite numbers, or only zeros, is replaced by equal probabilities.
    """

    def __init__(self, buckets: LengthBuckets, probabilities: np.ndarray):
        given = np.asarray(probabilities, np.float64)
        if given.ndim != 2 or given.shape[1] != buckets.num:
            raise ValueError(
                f"probabilities{given.shape} are not allowed; expected [sequences, {buckets.num}]"
            )
        usable = np.isfinite(given).all(1) & (given >= 0).all(1) & (given.sum(1) > 0)
        given = np.where(usable[:, None], given, 1.0)
        self.buckets = buckets
        self.probabilities = given / given.sum(1, keepdims=True)
        self._take_edges()

    @classmethod
    def known(
        cls, buckets: LengthBuckets, probabilities: np.ndarray, lines: tuple[np.ndarray, np.ndarray]
    ) -> Self:
        """Return rows of other distributions, with their `lines`; nothing is checked."""
        self = cls.__new__(cls)
        self.buckets = buckets
        self.probabilities = probabilities
        self.lines = lines
        self._take_edges()
        return self

    def _take_edges(self) -> None:
        self._low, self._high, self._bucket_from = _edges(self.buckets)

    def __len__(self) -> int:
        return len(self.probabilities)

    def after(
        self, elapsed: Int[np.ndarray, " sequences"] | int
    ) -> Float[np.ndarray, "sequences buckets"]:
        return self._after(self._column(elapsed))[0]

    def expected_remaining(
        self, elapsed: Int[np.ndarray, " sequences"] | int = 0
    ) -> Float[np.ndarray, " sequences"]:
        """Return E(L - t | L > t) in tokens; 1 from the longest length on."""
        t = self._column(elapsed)
        left, low = self._after(t)
        mean = (low + 1 + self._high) / 2
        return np.where(t[:, 0] >= self.buckets.max_length, 1.0, (left * (mean - t)).sum(1))

    def quantile(
        self,
        level: float | Float[np.ndarray, " sequences"],
        elapsed: Int[np.ndarray, " sequences"] | int = 0,
    ) -> Int64[np.ndarray, " sequences"]:
        """Return the smallest lengths q > elapsed with P(L <= q | L > elapsed) >= level."""
        t = self._column(elapsed)
        left, low = self._after(t)
        reached = np.cumsum(left, axis=1)
        level = np.broadcast_to(np.asarray(level, np.float64), len(self))[:, None]
        bucket = np.argmax(reached >= level - 1e-12, axis=1)[:, None]
        # A level that is not reached because of rounding is in the last bucket.
        bucket = np.where(reached[:, -1:] < level - 1e-12, self.buckets.num - 1, bucket)

        def at(array: np.ndarray) -> np.ndarray:
            return np.take_along_axis(np.broadcast_to(array, left.shape), bucket, 1)[:, 0]

        before, inside = at(reached) - at(left), at(left)
        share = np.clip((level[:, 0] - before) / np.where(inside == 0, 1.0, inside), 0.0, 1.0)
        length = np.ceil(at(low) + share * (at(self._high) - at(low)) - 1e-9)
        return np.maximum(length, t[:, 0] + 1).astype(np.int64)

    def survival(
        self, elapsed: Int[np.ndarray, " sequences"] | int, more: Float[np.ndarray, " times"]
    ) -> Float[np.ndarray, "sequences times"]:
        """Return P(L > t + m | L > t) for `more` tokens m."""
        t = self._column(elapsed)
        total = self._over(t)
        alive = self._over(t + more) / np.maximum(total, _NOTHING_LEFT)
        refuted = total[:, 0] < _NOTHING_LEFT
        if refuted.any():  # then all lengths that are left are equally likely
            longest, t = float(self.buckets.max_length), t[refuted]
            left = (longest - t - more) / np.maximum(longest - t, 1e-9)
            alive[refuted] = np.clip(left, 0.0, 1.0)
        return alive

    def remaining(
        self, elapsed: Int[np.ndarray, " sequences"] | int, buckets: LengthBuckets
    ) -> Float[np.ndarray, "sequences buckets"]:
        """Return P(L - t in bucket | L > t), on buckets of remaining length.

        A remaining length over the longest of `buckets` counts as the longest.
        """
        alive = self.survival(elapsed, np.asarray(buckets.edges, np.float64))
        alive[:, 0], alive[:, -1] = 1.0, 0.0
        return -np.diff(alive, axis=1)

    def cdf(self, lengths: Int[np.ndarray, " sequences"]) -> Float[np.ndarray, " sequences"]:
        """Return P(L <= length) for each sequence's own length."""
        return 1.0 - (self.probabilities * self._share_over(self._column(lengths))).sum(1)

    def _after(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return P(bucket | L > t) and each bucket's lower edge after t, [sequences, buckets]."""
        over = self._share_over(t)
        left = self.probabilities * over
        total = left.sum(1, keepdims=True)
        # After a refuted prediction, all lengths that are left are equally likely.
        flat = over * (self._high - self._low)
        flat[:, -1] += flat.sum(1) == 0
        left = np.where(total < _NOTHING_LEFT, flat, left)
        low = np.minimum(np.maximum(self._low, t), self._high)
        return left / left.sum(1, keepdims=True), low

    def _over(self, lengths: np.ndarray) -> np.ndarray:
        """Return P(L > length) for lengths [sequences, any], which is linear within a bucket."""
        rate, tail = self.lines
        place = self._bucket_from.take(lengths.astype(np.intp), mode="clip")
        place += np.arange(0, rate.size, self.buckets.num)[:, None]
        over = rate.take(place)
        over *= lengths
        np.subtract(tail.take(place), over, out=over)
        return np.maximum(over, 0.0, out=over)

    @functools.cached_property
    def lines(self) -> tuple[np.ndarray, np.ndarray]:
        """P(L > length) is `tail - rate * length` within a bucket: both [sequences, buckets]."""
        rate = self.probabilities / (self._high - self._low)
        # From the longest on, so that the tail has no rounding errors of the rest.
        tail = np.cumsum(self.probabilities[:, ::-1], axis=1)[:, ::-1] + rate * self._low
        return rate, tail

    def _share_over(self, t: np.ndarray) -> np.ndarray:
        """Return the share of each bucket's lengths that are over t."""
        return np.clip((self._high - t) / (self._high - self._low), 0.0, 1.0)

    def _column(self, values: np.ndarray | int) -> np.ndarray:
        column = np.asarray(values, np.float64)
        return (column if column.ndim else np.full(len(self), column))[:, None]


@functools.lru_cache(maxsize=16)
def _edges(buckets: LengthBuckets) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return lower and upper edges, and the bucket of lengths over 0, 1, ... up to the longest."""
    edges = np.asarray(buckets.edges, np.float64)
    starts = np.arange(buckets.max_length + 1)
    bucket = np.minimum(np.searchsorted(buckets.edges, starts, "right") - 1, buckets.num - 1)
    return edges[:-1], edges[1:], bucket
