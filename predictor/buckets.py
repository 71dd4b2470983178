"""Length buckets, the predictor's classes (S3, section 3.1)."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Float

NUM_BUCKETS = 10
# Distributions hold a number for each length, so a huge one would take all memory; no model's
# context is as long.
MAX_LENGTH = 1 << 24
KINDS = ("equal", "log", "quantile")


@final
@dataclass(frozen=True)
class LengthBuckets:
    """Ranges of output lengths: bucket i holds lengths in (edges[i], edges[i + 1]].

    Attributes:
      edges: int [buckets + 1], in tokens, strictly increasing from 0 to at most `MAX_LENGTH`.
    """

    edges: tuple[int, ...]

    def __post_init__(self) -> None:
        edges = self.edges
        is_whole = set(map(type, edges)) == {int}
        if (
            not is_whole
            or len(edges) < 2
            or edges[0] != 0
            or edges[-1] > MAX_LENGTH
            or any(a >= b for a, b in zip(edges, edges[1:]))  # noqa: B905
        ):
            raise ValueError(
                f"edges={reprlib.repr(edges)} are not allowed; pass 0 and then increasing lengths, "
                f"whole numbers of at most {MAX_LENGTH:,}"
            )

    @classmethod
    def of(
        cls, kind: str, lengths: Sequence[int], max_length: int, num: int = NUM_BUCKETS
    ) -> LengthBuckets:
        """Make buckets of a kind by its name: equal (as in the paper), log or quantile.

        Args:
          lengths: output lengths; only quantile buckets depend on them.

        Raises:
          ValueError: `kind` is unknown, `num` is out of range, or `max_length` is not 1 to
            `MAX_LENGTH`.
        """
        if kind not in KINDS:
            raise ValueError(f"buckets={kind!r} is unknown; pass one of {', '.join(KINDS)}")
        if kind == "quantile":
            return cls.quantiles(lengths, max_length, num)
        return (cls.equal_width if kind == "equal" else cls.logarithmic)(max_length, num)

    @classmethod
    def equal_width(cls, max_length: int, num: int = NUM_BUCKETS) -> LengthBuckets:
        _check(max_length, num, most=max_length)
        return cls._rounded(np.linspace(0, max_length, num + 1), max_length, num)

    @classmethod
    def logarithmic(cls, max_length: int, num: int = NUM_BUCKETS) -> LengthBuckets:
        """Make buckets whose edges grow by a constant factor; short lengths get narrow buckets."""
        _check(max_length, num, most=max_length)
        edges = np.concatenate([[0], np.geomspace(max_length ** (1 / num), max_length, num)])
        return cls._rounded(edges, max_length, num)

    @classmethod
    def quantiles(
        cls, lengths: Sequence[int], max_length: int, num: int = NUM_BUCKETS
    ) -> LengthBuckets:
        """Make buckets that hold about equal shares of `lengths`.

        There are fewer than `num` buckets when many lengths are equal.
        """
        if not len(lengths):
            raise ValueError("quantile buckets need lengths, and there are none; pass at least 1")
        _check(max_length, num, most=MAX_LENGTH)
        inner = np.quantile(np.minimum(lengths, max_length), np.arange(1, num) / num)
        edges = [0]
        for edge in (*np.ceil(inner).astype(int), max_length):
            if edge > edges[-1]:
                edges.append(int(edge))
        return cls(tuple(edges))

    @classmethod
    def _rounded(
        cls, edges: Float[np.ndarray, " edges"], max_length: int, num: int
    ) -> LengthBuckets:
        least = np.arange(num + 1)
        whole = np.maximum(np.round(edges).astype(int), least)
        whole = np.minimum(np.maximum.accumulate(whole - least) + least, max_length - num + least)
        return cls(tuple(int(edge) for edge in whole))

    @property
    def num(self) -> int:
        return len(self.edges) - 1

    @property
    def max_length(self) -> int:
        """The longest length of the last bucket; longer lengths count as this one."""
        return self.edges[-1]

    def bucket_of(self, lengths: np.ndarray | Sequence[int] | int) -> np.ndarray:
        """Return the bucket of each length, int64, in the shape of `lengths`."""
        clipped = np.clip(lengths, 1, self.max_length)
        return np.searchsorted(self.edges, clipped, side="left") - 1

    def upper(self, buckets: np.ndarray | int) -> np.ndarray:
        """Return the longest length of each bucket, which S3 reserves."""
        return np.asarray(self.edges)[np.asarray(buckets) + 1]

    def middle(self, buckets: np.ndarray | int) -> np.ndarray:
        """Return the mean length of each bucket, with its lengths equally likely."""
        edges, index = np.asarray(self.edges), np.asarray(buckets)
        return (edges[index] + 1 + edges[index + 1]) / 2


def _check(max_length: int, num: int, *, most: int) -> None:
    """Raise ValueError unless `num` is 1 to `most` and `max_length` 1 to `MAX_LENGTH`."""
    if not 1 <= num <= most or not 1 <= max_length <= MAX_LENGTH:
        raise ValueError(
            f"num={num} buckets of lengths up to {max_length} are not allowed; pass 1 to {most:,} "
            f"buckets, and a longest length of 1 to {MAX_LENGTH:,}"
        )
