"""Length distributions of many sequences as one array."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import final

import numpy as np

from jaxserve.core.prediction import LengthPrediction
from predictor import LengthBuckets, LengthDistributions

_FEWEST_ROWS = 64
# The row of sequences without a prediction.
_UNKNOWN = 0


@final
class LengthTable:
    """One row of probabilities for each sequence, on buckets that all rows share.

    A sequence without a row of its own has every length up to the longest with equal probability.
    """

    def __init__(self, buckets: LengthBuckets):
        self._buckets = buckets
        # As they were set; normalised; and with the two arrays of `LengthDistributions.lines`, so
        # that asking for some rows computes nothing.
        zeros: np.ndarray = np.zeros((4, _FEWEST_ROWS, buckets.num))
        self._given, self._probabilities, self._rate, self._tail = zeros
        self._set(_UNKNOWN, np.diff(buckets.edges) / buckets.max_length)
        self._at: np.ndarray = np.zeros(_FEWEST_ROWS, np.int64)
        self._row_of: dict[int, int] = {}
        self._free = list(range(_FEWEST_ROWS - 1, _UNKNOWN, -1))

    def put(self, key: int, prediction: LengthPrediction, at: int) -> None:
        """Set the row of a sequence.

        Args:
          key: of the sequence.
          prediction: of the output tokens still to come; on other buckets it is converted.
          at: output tokens that had come.
        """
        row = self._row_of.get(key)
        if row is None:
            if not self._free:
                self._grow()
            row = self._row_of[key] = self._free.pop()
        probabilities = prediction.probabilities
        if prediction.buckets != self._buckets:
            probabilities = prediction.distribution.remaining(0, self._buckets)[0]
        self._set(row, probabilities)
        self._at[row] = at

    def drop(self, key: int) -> None:
        """Free the row of a sequence, if it has one."""
        row = self._row_of.pop(key, None)
        if row is not None:
            self._free.append(row)

    def rows_of(self, keys: Seq[int]) -> list[int]:
        """Return the row of each sequence."""
        return [self._row_of.get(key, _UNKNOWN) for key in keys]

    def has_own(self, rows: Seq[int]) -> bool:
        """Return whether one of these rows is a sequence's own."""
        return any(row != _UNKNOWN for row in rows)

    def distributions(self, rows: Seq[int]) -> LengthDistributions:
        """Return what these rows say."""
        lines = self._rate[rows], self._tail[rows]
        return LengthDistributions.known(self._buckets, self._probabilities[rows], lines)

    def probabilities(self, rows: Seq[int]) -> np.ndarray:
        """Return these rows as they were set: float [rows, buckets]."""
        return self._given[rows]

    def at(self, rows: Seq[int]) -> np.ndarray:
        """Return the output tokens that had come when these rows were set: int [rows]."""
        return self._at[rows]

    def _set(self, row: int, probabilities: np.ndarray) -> None:
        known = LengthDistributions(self._buckets, probabilities[None])
        self._given[row], self._probabilities[row] = probabilities, known.probabilities[0]
        (self._rate[row],), (self._tail[row],) = known.lines

    def _grow(self) -> None:
        count = len(self._at)
        self._given, self._probabilities, self._rate, self._tail, self._at = (
            np.concatenate([array, np.zeros_like(array)])
            for array in (self._given, self._probabilities, self._rate, self._tail, self._at)
        )
        self._free = list(range(2 * count - 1, count - 1, -1))
