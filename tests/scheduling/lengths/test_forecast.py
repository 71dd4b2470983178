"""Expected lengths of running sequences, compared with simulation."""

import numpy as np
import pytest

from jaxserve.predictor import LengthBuckets, LengthDistributions
from jaxserve.scheduling.lengths import Forecast

BUCKETS = LengthBuckets.equal_width(100, 5)


def _drawn(
    rng: np.random.Generator, probabilities: np.ndarray, elapsed: int, count: int
) -> np.ndarray:
    """Return lengths over `elapsed` of one sequence, by rejection sampling."""
    lengths = np.zeros(0)
    while len(lengths) < count:
        bucket = rng.choice(BUCKETS.num, size=4 * count, p=probabilities)
        some = np.asarray(BUCKETS.edges)[bucket] + rng.random(4 * count) * 20
        lengths = np.concatenate([lengths, some[some > elapsed]])
    return lengths[:count]


def test_survival_and_ends_are_those_of_drawn_lengths():
    """P(still running) after 0, 7 and 30 more tokens, for sequences at different ages."""
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(5), size=3)
    elapsed = np.asarray([0, 33, 75])
    forecast = Forecast(LengthDistributions(BUCKETS, probabilities), elapsed, np.full(3, 1000))
    times = np.asarray([0.0, 7.0, 30.0])
    survival = forecast.survival(times)
    for row in range(3):
        drawn = _drawn(rng, probabilities[row], elapsed[row], 20_000)
        share = [(drawn - elapsed[row] > t).mean() for t in times]
        np.testing.assert_allclose(survival[row], share, atol=0.015)
    np.testing.assert_allclose(forecast.expected_ends(times), (1 - survival).sum(0))


def test_the_peak_is_that_of_simulated_futures():
    """The mean agrees without a margin; with two deviations hardly any future exceeds it."""
    rng = np.random.default_rng(1)
    probabilities = rng.dirichlet(np.ones(5), size=12)
    elapsed = rng.integers(0, 90, 12)
    held = elapsed + rng.integers(5, 60, 12)
    forecast = Forecast(LengthDistributions(BUCKETS, probabilities), elapsed, np.full(12, 1000))
    ends = np.stack(
        [_drawn(rng, p, e, 500) - e for p, e in zip(probabilities, elapsed, strict=True)]
    )
    times = np.arange(100)
    use = ((ends[..., None] > times) * (held[:, None, None] + times)).sum(0)  # [futures, times]
    memory = forecast.memory(held, forecast.longest)
    assert abs(memory.peak(0.0) / use.mean(0).max() - 1) < 0.03
    assert (use.max(1) > 1.01 * memory.peak(2.0)).mean() < 0.1


def test_memory_in_use_adds_up():
    """The use of some sequences and that of others are the use of all, at the same times."""
    rng = np.random.default_rng(2)
    probabilities, held = rng.dirichlet(np.ones(5), size=9), rng.integers(1, 60, 9)

    def forecast(which: slice) -> Forecast:
        elapsed = np.arange(0, 90, 10)[which]
        return Forecast(
            LengthDistributions(BUCKETS, probabilities[which]), elapsed, np.full(len(elapsed), 200)
        )

    everything = forecast(slice(9))
    some, others = (forecast(each) for each in (slice(5), slice(5, 9)))
    added = some.memory(held[:5], everything.longest).plus(
        others.memory(held[5:], everything.longest)
    )
    assert added.peak(1.0) == pytest.approx(
        everything.memory(held, everything.longest).peak(1.0), rel=1e-12
    )


def test_no_sequence_runs_past_the_limit():
    """This holds however long the prediction is, also if an answer has exceeded it."""
    sure = np.asarray([[0, 0, 0, 0, 1.0]])
    forecast = Forecast(LengthDistributions(BUCKETS, sure), np.asarray([10]), np.asarray([4]))
    assert forecast.survival(np.asarray([3.0, 4.0])).tolist() == [[1.0, 0.0]]
    outlived = Forecast(LengthDistributions(BUCKETS, sure), np.asarray([150]), np.asarray([30]))
    assert outlived.survival(np.asarray([29.0, 30.0])).tolist() == [[1.0, 0.0]]
    assert forecast.expected_remaining().tolist() == [4.0]
