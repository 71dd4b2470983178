"""Temperatures are fitted, and reservations have the requested miss rate."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.predictor import (
    Calibration,
    LengthBuckets,
    LengthDistributions,
    Recalibration,
    evaluate,
)
from jaxserve.predictor.calibration import softmax
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
        missed = (new_lengths > predicted.quantile(fitted.level(promised))).mean()
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


def _one_hot(places: np.ndarray, certain: float = 0.9) -> np.ndarray:
    """Return predictions that are sure of one of ten buckets."""
    rows = np.full((len(places), 10), (1 - certain) / 9)
    rows[np.arange(len(places)), places] = certain
    return rows


def _served(predicted: np.ndarray, lengths: np.ndarray) -> Recalibration:
    """Return what was learned after these answers, none of which runs on."""
    found = Recalibration(LengthBuckets.equal_width(100))
    for row, length in zip(predicted, lengths, strict=True):
        found.note(row, int(length), is_whole=True)
        if found.is_due:
            found.update(np.zeros((0, 10)), np.zeros(0, np.int64))
    return found


@pytest.mark.parametrize("kind", ["random", "reversed", "long", "short"])
def test_wrong_predictions_become_what_was_served(kind):
    """Corrected, all answers together are expected to be as long as those before were."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(np.ceil(rng.exponential(25, 400)), 100)
    places = LengthBuckets.equal_width(100).bucket_of(lengths)
    said = {
        "random": rng.permutation(places),
        "reversed": 9 - places,
        "long": np.full(400, 9),
        "short": np.zeros(400, np.int64),
    }[kind]
    predicted = _one_hot(said)
    found = _served(predicted, lengths)
    assert found.trust < 10
    # Reversed ones tell lengths apart, once their meaning is known.
    assert found.is_informative == (kind == "reversed")
    buckets = LengthBuckets.equal_width(100)
    before, after = (
        LengthDistributions(buckets, rows).expected_remaining().mean()
        for rows in (predicted, found.corrected(predicted))
    )
    assert abs(after - lengths.mean()) < 0.1 * lengths.mean()
    assert kind == "random" or abs(before - lengths.mean()) > 0.1 * lengths.mean()


def test_right_predictions_stay():
    """Predictions that say more than the answers of their class did are left as they are."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 101, 300)
    predicted = _one_hot(LengthBuckets.equal_width(100).bucket_of(lengths), 0.99)
    found = _served(predicted, lengths)
    np.testing.assert_allclose(found.corrected(predicted), predicted, atol=0.02)


def test_answers_that_run_count_for_what_they_have_passed():
    """Short answers end first: what still runs shows that not all are short."""
    row = np.full(10, 0.1)
    found = _served(np.tile(row, (20, 1)), np.full(20, 5))
    short = found.corrected(row[None])[0, 0]
    found.update(np.tile(row, (60, 1)), np.full(60, 50))
    assert found.corrected(row[None])[0, 0] < 0.4 < 0.8 < short
    assert found.corrected(row[None])[0, 1:5].sum() < 0.1
