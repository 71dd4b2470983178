"""A change of lengths is found, whether or not all answers have ended; chance is not one."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.planning.schedules.drift import (
    Lifetimes,
    drift,
    kaplan_meier,
    num_known,
    share_beyond,
)

pytestmark = pytest.mark.fast


def _normal(mean: float, std: float, num: int, rng: np.random.Generator) -> np.ndarray:
    return np.clip(np.round(rng.normal(mean, std, num)), 1, None).astype(int)


def test_equal_distributions_are_hardly_ever_taken_for_different():
    """At most 6 in 2000 pairs of samples of one distribution: few events make chance larger."""
    rng = np.random.default_rng(0)
    found = sum(
        drift(
            Lifetimes.whole(_normal(128, 68, num, rng)), Lifetimes.whole(_normal(128, 68, 64, rng))
        )
        > 1
        for num in (64, 200, 500, 2000)
        for _ in range(500)
    )
    assert found <= 6


@pytest.mark.parametrize(
    ("mean", "std", "num"),
    [(0.7, 1.0, 128), (1.3, 1.0, 128), (1.0, 0.7, 512), (1.0, 1.3, 800), (1.1, 1.0, 1024)],
)
def test_changes_are_found(mean: float, std: float, num: int):
    """A changed mean or deviation is found among `num` answers, in 19 of 20 draws."""
    rng = np.random.default_rng(1)
    found = [
        drift(
            Lifetimes.whole(_normal(256, 68, 1000, rng)),
            Lifetimes.whole(_normal(256 * mean, 68 * std, num, rng)),
        )
        for _ in range(20)
    ]
    assert sum(value > 1 for value in found) >= 19


def test_answers_that_run_count_with_what_they_have():
    """Newest answers cut off at random are like the others; without censoring they are not."""
    rng = np.random.default_rng(2)
    before = Lifetimes.whole(_normal(128, 40, 1000, rng))
    whole = _normal(128, 40, 400, rng)
    cut = rng.integers(1, 200, 400)
    newest = Lifetimes(np.minimum(whole, cut), whole <= cut)
    assert drift(before, newest) < 1
    only_ended = Lifetimes.whole(whole[whole <= cut])
    assert drift(before, only_ended) > 1
    longer = Lifetimes(np.minimum(2 * whole, cut), 2 * whole <= cut)
    assert drift(before, longer) > 1


def test_kaplan_meier_estimates_what_was_cut_off():
    """Mean and survival are those of the whole answers, not of those that have ended."""
    rng = np.random.default_rng(3)
    whole = _normal(100, 30, 5000, rng)
    cut = rng.integers(1, 400, 5000)
    estimated = kaplan_meier(Lifetimes(np.minimum(whole, cut), whole <= cut))
    assert estimated.sum() == pytest.approx(1)
    mean = estimated @ np.arange(len(estimated))
    assert mean == pytest.approx(whole.mean(), rel=0.02)
    assert whole[whole <= cut].mean() < 0.98 * whole.mean()
    np.testing.assert_allclose(
        kaplan_meier(Lifetimes.whole(np.array([1, 1, 3]))), [0, 2 / 3, 0, 1 / 3]
    )


def test_the_share_beyond_every_ended_answer():
    """Half of the answers go on with the length of the longest ended one, so they are longer."""
    lengths, has_ended = np.array([2, 4, 4, 4]), np.array([True, True, False, False])
    assert share_beyond(Lifetimes(lengths, has_ended)) == pytest.approx(0.5)
    assert share_beyond(Lifetimes.whole(lengths)) == 0


def test_whole_lengths_are_known_and_cut_ones_in_part():
    """Of 1,000 whole lengths all are known; cut at random, the tail is told by fewer.

    The estimated share of the longest ones varies as with that number of whole lengths.
    """
    rng = np.random.default_rng(5)
    shares, known = [], []
    for _ in range(300):
        whole = _normal(100, 30, 1000, rng)
        assert num_known(Lifetimes.whole(whole), 0.01) == pytest.approx(1000)
        cut = rng.integers(1, 300, 1000)
        lifetimes = Lifetimes(np.minimum(whole, cut), whole <= cut)
        shares.append(kaplan_meier(lifetimes)[150:].sum())
        known.append(num_known(lifetimes, 0.05))
    mean = np.mean(shares)
    as_many = mean * (1 - mean) / np.var(shares)
    assert np.median(known) == pytest.approx(as_many, rel=0.2) and as_many < 800
    assert num_known(Lifetimes.whole(np.full(7, 5)), 0.01) == 7


def test_few_answers_say_nothing():
    """Fewer than eight ended answers are no evidence."""
    one = Lifetimes.whole(np.array([5]))
    other = Lifetimes.whole(np.array([500, 600]))
    assert drift(one, other) == 0
    nothing_ended = Lifetimes(np.array([3, 4, 5]), np.zeros(3, bool))
    assert drift(Lifetimes.whole(np.arange(1, 100)), nothing_ended) < 1
