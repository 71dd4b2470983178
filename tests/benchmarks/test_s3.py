"""The S3 paper's tables, simulated on a few requests."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.common.s3_machines import Run, imitated, machines
from benchmarks.s3 import POLICIES
from jaxserve.workload import WorkloadItem

pytestmark = pytest.mark.release


def _items(count: int) -> list[WorkloadItem]:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(4.5, 0.8, count), 1000).astype(int) + 1
    return [
        WorkloadItem(prompt_token_ids=tuple(range(1, 40)), num_output_tokens=int(length))
        for length in lengths
    ]


def test_an_imitated_predictor_is_right_as_often_as_it_says():
    """Its distribution has the same probability for the right bucket."""
    items = _items(2000)
    predictions = imitated(items, 0.8, 0)
    right = [
        prediction.likeliest_length >= item.num_output_tokens > prediction.likeliest_length - 205
        for prediction, item in zip(predictions, items, strict=True)
    ]
    assert abs(np.mean(right) - 0.8) < 0.03
    assert all(abs(prediction.probabilities.sum() - 1) < 1e-9 for prediction in predictions)


def test_knowing_lengths_makes_batches_larger_and_runs_faster():
    """On the machine with the least memory the order is ORCA, S3, the oracle, and our policy."""
    items = _items(120)
    predictions = imitated(items, 0.95, 0)
    cost = dict(machines())["LLAMA 33B"]
    found = {policy: Run(policy, cost, items, predictions, 256).at_once() for policy in POLICIES}
    batch = {policy: figures["average_batch"] for policy, figures in found.items()}
    assert 3 < batch["orca"] < 7
    assert batch["orca"] < batch["s3"] <= batch["s3_oracle"] * 1.02 and batch["auto"] > batch["s3"]
    rate = {policy: figures["output_tokens_per_s"] for policy, figures in found.items()}
    assert rate["orca"] < rate["s3"] <= rate["s3_oracle"] * 1.02
    assert all(figures["num_failed"] == 0 for figures in found.values())
