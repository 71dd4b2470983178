"""Temperatures are fitted, and reservations have the requested miss rate."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.predictor import Calibration, LengthBuckets, LengthDistributions, evaluate
from jaxserve.predictor.calibration import softmax
from jaxserve.predictor.evaluation import miss_rates
from tests.common.tiers import some

BUCKETS = LengthBuckets.equal_width(200)


def _draw(random: np.random.Generator, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Return logits, and lengths that are drawn from them."""
    logits = 2.0 * random.standard_normal((num, BUCKETS.num))
    cumulative = np.cumsum(softmax(logits), axis=1)
    bucket = (random.random((num, 1)) > cumulative).sum(1).clip(max=BUCKETS.num - 1)
    low = np.asarray(BUCKETS.edges)[bucket]
    return logits, low + random.integers(1, BUCKETS.upper(bucket) - low + 1)


@pytest.mark.parametrize("wrong", [0.3, 1.0, 4.0])
def test_the_temperature_is_found(wrong):
    """Overconfident and underconfident logits are scaled back."""
    logits, lengths = _draw(np.random.default_rng(0), 4000)
    fitted = Calibration.fit(BUCKETS, logits * wrong, lengths)
    assert fitted.temperature == pytest.approx(wrong, rel=0.1)


@pytest.mark.release
@pytest.mark.parametrize("promised", some([0.1, 0.05, 0.3]))
def test_reservations_have_the_requested_miss_rate(promised):
    """For any predictor the share that outgrows them is the requested one, within 2 points."""
    random = np.random.default_rng(1)
    for distort in (1.0, 5.0, -1.0, 0.0):
        (logits, lengths), (new, new_lengths) = _draw(random, 20_000), _draw(random, 20_000)
        fitted = Calibration.fit(BUCKETS, logits * distort, lengths)
        scaled = softmax(new * distort / fitted.temperature)
        predicted = LengthDistributions(BUCKETS, scaled)
        (missed,) = miss_rates(predicted, new_lengths, [fitted.level(promised)])
        assert abs(missed - promised) < 0.02, distort


@pytest.mark.usefixtures("unchecked_shapes")
def test_too_few_held_out_requests_reserve_the_longest():
    """With nine requests, a miss rate under a tenth is possible only with the longest length."""
    logits, lengths = _draw(np.random.default_rng(2), 9)
    fitted = Calibration.fit(BUCKETS, logits, lengths)
    assert fitted.level(0.05) == 1.0 and fitted.level(0.5) < 1.0
    for wrong in (0.0, 1.0, -1.0):
        with pytest.raises(ValueError, match="between 0 and 1"):
            fitted.level(wrong)
    with pytest.raises(ValueError, match="at least one of each"):
        Calibration.fit(BUCKETS, logits, lengths[:3])


def test_figures_of_an_evaluation():
    """Accuracy, distance, error and under-prediction agree with a case counted by hand."""
    logits = np.log(np.full((4, BUCKETS.num), 1e-9))
    logits[[0, 1, 2, 3], [0, 3, 5, 9]] = 0.0
    figures = evaluate(BUCKETS, logits, np.asarray([7, 81, 81, 190]))
    assert figures.accuracy == 0.5
    assert figures.wrong_by == 1.0
    assert figures.under_prediction == 0.25
    expected = np.abs(np.asarray([10.5, 70.5, 110.5, 190.5]) - [7, 81, 81, 190]).mean()
    assert figures.error_tokens == pytest.approx(expected, rel=1e-3)
    assert figures.calibration_error == pytest.approx(0.5, abs=1e-3)


def test_calibrated_predictions_are_reliable():
    """Confidence equals accuracy for calibrated logits, and not for doubled ones."""
    logits, lengths = _draw(np.random.default_rng(3), 20_000)
    assert evaluate(BUCKETS, logits, lengths).calibration_error < 0.015
    assert evaluate(BUCKETS, 3 * logits, lengths).calibration_error > 0.1
