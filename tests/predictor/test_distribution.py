"""Survival: the distribution of what remains after some tokens, compared with counting."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.predictor import LengthBuckets, LengthDistributions

pytestmark = pytest.mark.fast

BUCKETS = LengthBuckets((0, 4, 10, 11, 30))


def _by_counting(probabilities: np.ndarray, elapsed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return every length and its probability, given that it is over `elapsed`."""
    lengths = np.arange(1, BUCKETS.max_length + 1)
    index = BUCKETS.bucket_of(lengths)
    each = probabilities[index] / np.bincount(index)[index] * (lengths > elapsed)
    return lengths, each / each.sum()


@pytest.mark.parametrize("elapsed", [0, 1, 3, 4, 5, 9, 10, 11, 12, 29])
def test_conditioned_on_survival(elapsed):
    """Expected remaining lengths, bucket probabilities and quantiles agree with counting."""
    random = np.random.default_rng(elapsed)
    probabilities = random.dirichlet(np.ones(BUCKETS.num), 20)
    predicted = LengthDistributions(BUCKETS, probabilities)
    left = predicted.after(elapsed)
    remaining = predicted.expected_remaining(elapsed)
    for row, own in enumerate(probabilities):
        lengths, each = _by_counting(own, elapsed)
        counted = np.bincount(BUCKETS.bucket_of(lengths), each, BUCKETS.num)
        np.testing.assert_allclose(left[row], counted, atol=1e-12)
        np.testing.assert_allclose(remaining[row], each @ (lengths - elapsed))
        for level in (0.1, 0.5, 0.9, 1.0):
            got = int(predicted.quantile(level, elapsed)[row])
            assert each[lengths <= got].sum() >= level - 1e-9
            assert each[lengths < got].sum() < level + 1e-9


def test_each_sequence_has_its_own_clock():
    """`elapsed` may differ between rows, and so may the level."""
    predicted = LengthDistributions(BUCKETS, np.tile([0.25] * 4, (3, 1)))
    together = predicted.quantile(np.asarray([0.5, 0.9, 0.9]), np.asarray([0, 5, 20]))
    alone = [predicted.quantile(0.5, 0)[0], predicted.quantile(0.9, 5)[1]]
    assert together[:2].tolist() == alone and together[2] > 20


def test_a_refuted_prediction_knows_nothing_but_the_time():
    """If all mass is below `elapsed`, the remaining lengths are equally likely; then one more."""
    predicted = LengthDistributions(BUCKETS, np.asarray([[1.0, 0, 0, 0]]))
    assert predicted.expected_remaining(10)[0] == pytest.approx((1 + 20) / 2)
    assert predicted.quantile(1.0, 10)[0] == 30
    assert predicted.expected_remaining(30)[0] == 1.0
    assert predicted.quantile(0.5, 30)[0] == 31
    assert predicted.expected_remaining(1000)[0] == 1.0


def test_what_is_no_distribution_knows_nothing():
    """NaN, negative and all-zero rows become uniform; others are normalised."""
    rows = [[np.nan] * 4, [-1.0, 1, 1, 1], [0.0] * 4, [np.inf, 0, 0, 0], [2.0, 0, 0, 0]]
    predicted = LengthDistributions(BUCKETS, np.asarray(rows))
    np.testing.assert_allclose(predicted.probabilities[:4], 0.25)
    np.testing.assert_allclose(predicted.probabilities[4], [1, 0, 0, 0])
    with pytest.raises(ValueError, match=r"expected \[sequences, 4\]"):
        LengthDistributions(BUCKETS, np.ones((2, 3)))


def test_thousands_of_sequences_a_step():
    """One vectorised call handles all of them; an empty batch passes."""
    predicted = LengthDistributions(BUCKETS, np.random.default_rng(0).random((5000, 4)))
    elapsed = np.random.default_rng(1).integers(0, 40, 5000)
    assert predicted.quantile(0.9, elapsed).shape == predicted.expected_remaining(elapsed).shape
    assert (predicted.quantile(0.9, elapsed) > elapsed).all()
    assert len(LengthDistributions(BUCKETS, np.zeros((0, 4))).quantile(0.5)) == 0
