"""Sorted lists stay sorted while readings change what their order goes by."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.scheduling.admission.expected import Expected
from jaxserve.scheduling.admission.predicted import Predicted
from jaxserve.scheduling.order.longest_first import LongestFirst
from jaxserve.scheduling.order.shortest_first import ShortestPredictedFirst
from jaxserve.scheduling.policy import Order
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.testing import Trace

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


@pytest.mark.parametrize("name", ORDERS)
def test_lists_are_in_the_order_of_the_keys_that_were_taken(name: str):
    """A key stands from one wait to the next; without that, the lists would not be sorted."""
    order, num_unsorted, num_taken_again = ORDERS[name], 0, 0
    policy = replace(PRESETS["vllm_like"], name=name, order=order)
    for seed in range(25):
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
