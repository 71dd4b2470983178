"""Buckets cover every length once, however their edges were chosen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.predictor import LengthBuckets

pytestmark = pytest.mark.fast


@given(data=st.data())
def test_every_length_has_one_bucket(data):
    """A length is above its bucket's lower edge and not above its upper edge."""
    num = data.draw(st.integers(1, 20))
    longest = data.draw(st.integers(num, 5000))
    made = data.draw(st.sampled_from([LengthBuckets.equal_width, LengthBuckets.logarithmic]))
    buckets = made(longest, num)
    assert buckets.num == num and buckets.max_length == longest
    lengths = np.arange(1, longest + 1)
    index = buckets.bucket_of(lengths)
    edges = np.asarray(buckets.edges)
    assert (edges[index] < lengths).all() and (lengths <= buckets.upper(index)).all()
    assert set(index) == set(range(num))


def test_the_paper_s_buckets():
    """There are ten of equal width: 1 to 100, ..., 901 to 1000; longer ones are in the last."""
    buckets = LengthBuckets.equal_width(1000)
    assert buckets.bucket_of([1, 100, 101, 1000, 9999, 0]).tolist() == [0, 0, 1, 9, 9, 0]
    assert buckets.upper([0, 9]).tolist() == [100, 1000]
    assert buckets.middle(0) == 50.5


def test_quantiles_share_out_the_lengths():
    """Each bucket has about as many lengths; equal lengths give fewer buckets, not empty ones."""
    lengths = np.random.default_rng(0).integers(1, 1000, 5000)
    buckets = LengthBuckets.quantiles(lengths, 1000, 10)
    counts = np.bincount(buckets.bucket_of(lengths))
    assert len(counts) == 10 and counts.min() > 400
    assert LengthBuckets.quantiles([7] * 100, 50).edges == (0, 7, 50)


@pytest.mark.parametrize(
    "edges", [(), (0,), (1, 2), (0, 5, 5), (0, 9, 3), (0, 1.5), (0, 10**10), (0, "a")]
)
def test_edges_that_are_none(edges):
    """Edges that do not begin at 0, do not rise, or are no lengths are refused."""
    with pytest.raises(ValueError, match="increasing lengths"):
        LengthBuckets(edges)


def test_more_buckets_than_lengths():
    """The error has the requested number."""
    with pytest.raises(ValueError, match="num=10 buckets of lengths up to 9"):
        LengthBuckets.equal_width(9)
    for kind in ("equal", "log", "quantile"):
        with pytest.raises(ValueError, match="num=10000000000 buckets"):
            LengthBuckets.of(kind, [3], 1024, 10**10)
        with pytest.raises(ValueError, match="lengths up to 10000000000 are not allowed"):
            LengthBuckets.of(kind, [3], 10**10, 10**10)
    with pytest.raises(ValueError, match="there are none"):
        LengthBuckets.quantiles([], 100)


def test_buckets_by_name():
    """These are the names of the command line; an unknown name raises an error with the list."""
    lengths = list(range(1, 101))
    assert LengthBuckets.of("equal", lengths, 100, 4) == LengthBuckets.equal_width(100, 4)
    assert LengthBuckets.of("log", lengths, 100, 4) == LengthBuckets.logarithmic(100, 4)
    assert LengthBuckets.of("quantile", lengths, 100, 4).edges == (0, 26, 51, 76, 100)
    with pytest.raises(ValueError, match="buckets='even' is unknown; pass one of equal, log, q"):
        LengthBuckets.of("even", lengths, 100, 4)
    for kind in ("equal", "quantile"):
        with pytest.raises(ValueError, match="num=0"):
            LengthBuckets.of(kind, lengths, 100, 0)
