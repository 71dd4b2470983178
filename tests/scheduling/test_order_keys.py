"""Sorted lists stay sorted while readings change what their order goes by."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from jaxserve.core.prediction import LengthPrediction
from jaxserve.predictor import LengthBuckets
from jaxserve.scheduling.admission import Expected, Predicted
from jaxserve.scheduling.lengths import LengthEstimate
from jaxserve.scheduling.order import LongestFirst, ShortestPredictedFirst
from jaxserve.scheduling.policy import Order
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.testing import Trace
from tests.common.tiers import seeds, some
from tests.scheduling.simulated import request_of

ORDERS: dict[str, Order] = {
    "shortest": ShortestPredictedFirst(),
    "longest": LongestFirst(Predicted()),
    "quantiles": LongestFirst(Predicted(miss_rate=0.3)),
    # It depends on tokens that come while a sequence runs.
    "growing": LongestFirst(Expected()),
}


def _is_sorted(keys: list[Any]) -> bool:
    return keys == sorted(keys)


def _waiting_and_running(scheduler: Scheduler) -> tuple[list[Sequence], list[Sequence]]:
    return list(scheduler.waiting), scheduler.running


@seeds(25, 10)
@pytest.mark.parametrize("name", some(ORDERS))
def test_lists_are_in_the_order_of_the_keys_that_were_taken(seeds, name: str):
    """A key is fixed while a sequence waits; otherwise the lists would not be sorted."""
    order, num_unsorted, num_taken_again = ORDERS[name], 0, 0
    policy = replace(PRESETS["vllm_like"], name=name, order=order)
    for seed in seeds:
        trace = Trace(seed, probe="any")
        engine, rng = trace.engine(policy), random.Random(seed)
        scheduler, arriving = engine.scheduler, list(trace.requests)
        sequences: list[Sequence] = []
        taken: dict[int, tuple[int, Any]] = {}
        while arriving or engine.has_work:
            if arriving and rng.random() < 0.4:
                sequences += engine.add(arriving.pop(0))
            engine.step()
            for group in _waiting_and_running(scheduler):
                keys = [scheduler.order_keys.of(sequence) for sequence in group]
                assert _is_sorted(keys), f"seed {seed}"
                num_unsorted += not _is_sorted(
                    [order.key(sequence, scheduler.lengths) for sequence in group]
                )
                for sequence, key in zip(group, keys, strict=True):
                    times, before = taken.get(sequence.key, (0, key))
                    if times == sequence.num_preemptions:
                        assert key == before, f"seed {seed}: a key changed without a preemption"
                    num_taken_again += key != before
                    taken[sequence.key] = (sequence.num_preemptions, key)
        expected = trace.expected(trace.requests)
        for sequence in sequences:
            wanted = expected[sequence.request.id, sequence.sample_index]
            assert tuple(sequence.output) == wanted.output, f"seed {seed}"
    assert num_unsorted and num_taken_again


class _Known:
    """Estimates that are the same for every sequence."""

    def __init__(self, length: int):
        probabilities = np.array([0.0, 1.0])
        self._estimate = LengthEstimate(
            LengthPrediction(LengthBuckets((0, length - 1, length)), probabilities)
        )

    def estimate(self, sequence: Sequence) -> LengthEstimate:
        return self._estimate

    first_estimate = estimate


@pytest.mark.parametrize("order", [ShortestPredictedFirst(), LongestFirst(Predicted())])
def test_no_answer_counts_as_longer_than_its_limit(order: Order):
    """An estimate of 1,000 tokens gives an answer of at most 10 the key of one of 10."""
    request = request_of("a", arrival_s=5.0, max_tokens=10)
    (sequence,) = Trace(0).engine(PRESETS["vllm_like"]).add(request)
    keys = [order.key(sequence, _Known(length)) for length in (9, 10, 1000)]
    assert keys[0] != keys[1] == keys[2]


@dataclass(frozen=True)
class _Counting:
    """The order of arrival, which counts the keys that are computed."""

    heeds_bounds: ClassVar[bool] = False
    heeds_priority: ClassVar[bool] = False
    max_passes: int = 0
    taken: list[int] = field(default_factory=list)

    def key(self, sequence: Sequence, lengths: Any) -> int:
        self.taken.append(sequence.key)
        return sequence.key


def test_a_restarted_sequence_alone_gets_a_new_key():
    """New weights restart every waiting sequence: one key each is computed, not one per pair."""
    order = _Counting()
    trace = Trace(0)
    engine = trace.engine(replace(PRESETS["vllm_like"], name="counting", order=order))
    sequences = [each for request in trace.requests for each in engine.add(request)]
    order.taken.clear()
    for sequence in sequences:
        engine.scheduler.restart(sequence, keeps_output=False)
    assert order.taken == [sequence.key for sequence in sequences if sequence.output == []]
    assert list(engine.scheduler.waiting) == sequences and len(sequences) > 3
