"""What wrong predictions cost `auto`, on few requests."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.common.s3_machines import Run, machines
from benchmarks.lengths.wrong import cases, drawn
from jaxserve.predictor import LengthBuckets

pytestmark = pytest.mark.release

CONTEXT = 512
COST = dict(machines())["LLAMA 33B"]


def test_cases_say_what_their_names_do():
    """Reversed predictions call long answers short; drift changes what follows, not what was."""
    items = drawn("chat", 60, 0, CONTEXT)
    found = cases(items, [1.0], CONTEXT, 0)
    places = LengthBuckets.equal_width(CONTEXT).bucket_of([i.num_output_tokens for i in items])
    said = {
        kind: [int(np.argmax(each.probabilities)) for each in predicted]
        for kind, (_, predicted) in found.items()
    }
    assert said["right for 100%"] == places.tolist() != said["random"]
    assert sorted(said["random"]) == sorted(said["reversed"]) == sorted(places.tolist())
    assert said["reversed"][int(np.argmax(places))] == min(places)
    tripled = found["right until lengths become three times"][0]
    assert list(tripled[:30]) == items[:30] and tripled[30:] != items[30:]


@pytest.mark.parametrize("kind", ["right for 66%", "random", "reversed", "shortest", "longest"])
def test_wrong_predictions_cost_little(kind):
    """Most of these lost a tenth before predictions were corrected, and the longest two thirds."""
    items = drawn("two_kinds", 200, 5, CONTEXT)
    _, predicted = cases(items, [0.66], CONTEXT, 5)[kind]
    rate, unpredicted = (
        Run("auto", COST, items, said, 1024, CONTEXT).at_once()["output_tokens_per_s"]
        for said in (predicted, [None] * len(items))
    )
    assert rate > 0.965 * unpredicted
