"""Requests that pool beside requests that generate, in random traces without a device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.scheduling.admission import OnDemand
from jaxserve.scheduling.iteration.continuous import Unified
from jaxserve.scheduling.order import FCFS
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.preemption import LastInOrder
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.retention import Stateless
from jaxserve.scheduling.sequence import PooledPrompt
from jaxserve.testing import Trace
from tests.common.tiers import seeds, some

pytestmark = pytest.mark.fast

SWAPPED = Policy(
    "swapped",
    OnDemand(0.0),
    FCFS(),
    Unified(chunk_tokens=3),
    Stateless(),
    LastInOrder(keeps_state=True),
)
CASES = [(PRESETS["auto"], "last"), (SWAPPED, "mean")]
CASES += [(PRESETS[name], kind) for name in sorted(PRESETS) for kind in ("last", "mean")]


@seeds(60)
@pytest.mark.parametrize(
    "policy, pooling", some(CASES, 1), ids=lambda value: getattr(value, "name", value)
)
def test_pooled_states_are_those_of_the_request_alone(seeds, policy, pooling):
    """Chunks, preemptions, cached pages, cancellations and lost steps change none of them.

    The simulated states depend on every cell of the context as it is read through the page table.
    """
    num_pooled = num_preempted = 0
    for seed in seeds:
        trace = Trace(seed, pooling=pooling, with_conversations=policy.retention.keeps_pages)
        together = trace.check(policy, cancel_rate=0.02 if seed % 3 else 0.0)
        for key, alone in trace.expected().items():
            num_pooled += together[key].pooled is not None
            if alone.pooled is not None:
                assert not together[key].output
                num_preempted += together[key].num_preemptions
    assert num_pooled > 50
    assert num_preempted > 0 or policy is not SWAPPED


@pytest.mark.release
@seeds(40)
@pytest.mark.parametrize("pooling", some(["mean", "last"]))
def test_other_weights_and_pools_begin_again(seeds, pooling):
    """A sum over tokens counts each of them once, whatever is computed again."""
    for seed in seeds:
        trace = Trace(seed, pooling=pooling, with_conversations=True)
        trace.check(PRESETS["auto"], update_rate=0.1, recompute_rate=0.05)


def test_it_reserves_no_more_than_the_prompt():
    """A prompt that pools may fill the context, and no page is held for an answer."""
    trace = Trace(0, pooling="last")
    engine = trace.engine(PRESETS["orca"])
    request = next(each for each in trace.requests if each.params.pools)
    longest = (1,) * trace.config.max_length
    [sequence] = engine.add(replace(request, id="long", prompt=longest))
    assert engine.scheduler.tokens_to_reserve(sequence) == len(longest)
    while engine.has_work:
        engine.step()
    assert sequence.finish_reason == "stop" and not sequence.output
    assert sequence.pooled is not None and sequence.pooled.mean is not None


def test_tokens_that_are_computed_again_count_once():
    """Rows that overlap with earlier ones add only what is new."""
    pooled = PooledPrompt(10, 10)
    assert [pooled.plan(*span) for span in [(0, 4), (0, 3), (2, 7), (7, 10)]] == [4, 0, 3, 3]
    assert pooled.mean is None
    for num in (4, 3, 3):
        pooled.add(num, np.full(2, num, np.float32))
    np.testing.assert_array_equal(pooled.mean, [1.0, 1.0])
