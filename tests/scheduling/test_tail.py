"""A batch does not end with a few long answers that began late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.core.prediction import LengthPrediction
from jaxserve.execution.step_cost import FlatCost
from jaxserve.planning import simulate
from jaxserve.predictor import LengthBuckets
from jaxserve.scheduling.presets import PRESETS
from jaxserve.workload import WorkloadItem
from tests.scheduling.simulated import item_of

pytestmark = pytest.mark.fast

CONFIG = EngineConfig(num_pages=200, max_slots=4, max_context=128, max_decode_iterations=4)
BUCKETS = LengthBuckets.equal_width(80, 8)
ITERATION_S = 1e-3


def _simulated(items: list[WorkloadItem], *, predicted: bool = True) -> Any:
    places = [BUCKETS.bucket_of(item.num_output_tokens) for item in items]
    said = [LengthPrediction(BUCKETS, row) for row in np.eye(BUCKETS.num)[places]]
    cost = FlatCost(per_iteration_s=ITERATION_S, per_token_s=0.0)
    predictions = said if predicted else None
    return simulate(items, PRESETS["auto"], CONFIG, cost, predictions=predictions, progress=False)


def test_an_answer_as_long_as_all_others_together_begins_early():
    """It is the last of 25 requests; the others, 8 tokens each, need 48 iterations for 4 slots."""
    items = [*(item_of(8) for _ in range(24)), item_of(64)]
    early, late = (_simulated(items, predicted=said).wall_s for said in (True, False))
    assert late > (48 + 64) * ITERATION_S * 0.95
    assert early < (48 + 64) * ITERATION_S * 0.75


def test_while_requests_arrive_the_first_goes_first():
    """There is no tail to shorten, and what has waited longer is not passed."""
    items = [item_of(64 if i % 5 == 4 else 8, 4 * i * ITERATION_S) for i in range(40)]
    began = [each.timing.admitted_s for each in _simulated(items).completions]
    began = [begin_s for begin_s in began if begin_s < items[-1].arrival_s]
    assert began == sorted(began) and len(began) > 25
