"""Length buckets: what the predictor chooses between (S3, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

NUM_BUCKETS = 10
KINDS = ("equal", "log", "quantile")


@final
@dataclass(frozen=True)
class LengthBuckets:
    """Ranges of output lengths: bucket i has those over `edges[i]`, up to `edges[i + 1]`.

    Attributes:
      edges: tokens, increasing from 0; one more than there are buckets.
    """

    edges: tuple[int, ...]

    def __post_init__(self) -> None:
        edges = self.edges
        if len(edges) < 2 or edges[0] != 0 or any(a >= b for a, b in zip(edges, edges[1:])):  # noqa: B905
            raise ValueError(f"edges={edges}: give 0 and then larger and larger lengths")

    @classmethod
    def of(
        cls, kind: str, lengths: Sequence[int], max_length: int, num: int = NUM_BUCKETS
    ) -> LengthBuckets:
        """By name: equal (as in the paper), log or quantile; only the last looks at the lengths.

        Raises:
          ValueError: another name; or see the methods below.
        """
        if kind not in KINDS:
            raise ValueError(f"buckets={kind!r}; give one of {', '.join(KINDS)}")
        if kind == "quantile":
            return cls.quantiles(lengths, max_length, num)
        return (cls.equal_width if kind == "equal" else cls.logarithmic)(max_length, num)

    @classmethod
    def equal_width(cls, max_length: int, num: int = NUM_BUCKETS) -> LengthBuckets:
        """As in the paper: each a `num`-th of the longest length."""
        return cls._rounded(np.linspace(0, max_length, num + 1), max_length, num)

    @classmethod
    def logarithmic(cls, max_length: int, num: int = NUM_BUCKETS) -> LengthBuckets:
        """Each about as many times longer than the one before: short answers told apart better."""
        edges = np.concatenate([[0], np.geomspace(max_length ** (1 / num), max_length, num)])
        return cls._rounded(edges, max_length, num)

    @classmethod
    def quantiles(
        cls, lengths: Sequence[int], max_length: int, num: int = NUM_BUCKETS
    ) -> LengthBuckets:
        """Each with about as many of these lengths; fewer buckets where many are equal."""
        if not len(lengths):
            raise ValueError("no lengths to take quantiles of")
        if num < 1 or max_length < 1:
            raise ValueError(f"{num} buckets of lengths up to {max_length}: give each a length")
        inner = np.quantile(np.minimum(lengths, max_length), np.arange(1, num) / num)
        edges = [0]
        for edge in (*np.ceil(inner).astype(int), max_length):
            if edge > edges[-1]:
                edges.append(int(edge))
        return cls(tuple(edges))

    @classmethod
    def _rounded(cls, edges: np.ndarray, max_length: int, num: int) -> LengthBuckets:
        """Whole numbers, each bucket with one length at least."""
        if num < 1 or max_length < num:
            raise ValueError(f"{num} buckets of lengths up to {max_length}: give each a length")
        least = np.arange(num + 1)
        whole = np.maximum(np.round(edges).astype(int), least)
        whole = np.minimum(np.maximum.accumulate(whole - least) + least, max_length - num + least)
        return cls(tuple(int(edge) for edge in whole))

    @property
    def num(self) -> int:
        return len(self.edges) - 1

    @property
    def max_length(self) -> int:
        """The longest length of the last bucket; longer ones count as this."""
        return self.edges[-1]

    def bucket_of(self, lengths: np.ndarray | Sequence[int] | int) -> np.ndarray:
        """Buckets (int64) of lengths of any shape."""
        clipped = np.clip(lengths, 1, self.max_length)
        return np.searchsorted(self.edges, clipped, side="left") - 1

    def upper(self, buckets: np.ndarray | int) -> np.ndarray:
        """The longest length of each bucket: what S3 reserves."""
        return np.asarray(self.edges)[np.asarray(buckets) + 1]

    def middle(self, buckets: np.ndarray | int) -> np.ndarray:
        """The mean length of each bucket, its lengths taken as equally likely."""
        edges, index = np.asarray(self.edges), np.asarray(buckets)
        return (edges[index] + 1 + edges[index + 1]) / 2
