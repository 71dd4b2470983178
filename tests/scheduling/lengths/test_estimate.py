"""Estimates of one answer's length, from its prompt and from a later reading."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.core.prediction import LengthPrediction
from jaxserve.predictor import Calibration, LengthBuckets, LengthDistributions
from jaxserve.scheduling.lengths import LengthEstimate

BUCKETS = LengthBuckets.equal_width(40, 4)
PROBABILITIES = np.asarray([0.1, 0.6, 0.2, 0.1])


@pytest.mark.parametrize("at", [0, 17])
def test_lengths_are_counted_from_the_answers_beginning(at):
    """A reading at 17 tokens gives lengths that are 17 tokens longer."""
    estimate = LengthEstimate(LengthPrediction(BUCKETS, PROBABILITIES), at)
    assert estimate.likeliest_length == at + 20
    assert estimate.expected_length == pytest.approx(at + 5.5 + 10 * (0.6 + 2 * 0.2 + 3 * 0.1))
    lengths = LengthDistributions(BUCKETS, PROBABILITIES[None])
    for num_outputs in (0, 12, 12, 39):
        for miss_rate in (0.1, 0.5):
            got = estimate.quantile(miss_rate, at + num_outputs)
            assert got == at + lengths.quantile(1 - miss_rate, num_outputs)[0]


def test_a_reservation_uses_the_predictions_calibration():
    """The level is that of the held-out requests, not the nominal one."""
    calibration = Calibration(1.0, np.full(99, 0.95))
    plain = LengthEstimate(LengthPrediction(BUCKETS, PROBABILITIES))
    calibrated = LengthEstimate(LengthPrediction(BUCKETS, PROBABILITIES, calibration))
    assert plain.quantile(0.5, 0) < calibrated.quantile(0.5, 0)
