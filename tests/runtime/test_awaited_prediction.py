"""A prediction is told once, whenever it comes, and never before its request was submitted."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.predictor import LengthBuckets
from jaxserve.runtime.forecaster import AwaitedPrediction

pytestmark = pytest.mark.fast

REQUEST = Request(id="r", prompt=(1,), params=SamplingParams(max_tokens=2), arrival_s=0.0)
PREDICTION = LengthPrediction(LengthBuckets.equal_width(8, 2), np.array([0.5, 0.5]))


@pytest.mark.parametrize("when", ["before", "meanwhile", "after"])
def test_a_prediction_that_comes_at_any_time(when: str):
    """It is in the request if it comes before, and else is told, after the submission."""
    told: list[LengthPrediction] = []
    awaited = AwaitedPrediction(REQUEST)
    late = [awaited.answer(PREDICTION)] if when == "before" else []
    request = awaited.wait(0.0)
    if when == "meanwhile":
        late.append(awaited.answer(PREDICTION))
    assert told == []
    awaited.submitted(told.append)
    if when == "after":
        late.append(awaited.answer(PREDICTION))
    assert late == [when != "before"]
    assert (request.prediction is PREDICTION) == (when == "before")
    assert told == ([] if when == "before" else [PREDICTION])


def test_no_prediction_is_told():
    """A predictor that failed gives none."""
    told: list[LengthPrediction] = []
    awaited = AwaitedPrediction(REQUEST)
    assert awaited.wait(0.0) is REQUEST
    awaited.submitted(told.append)
    assert not awaited.answer(None) and not told
