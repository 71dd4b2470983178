"""Slots that move keep all their state and needs, and the slots that they leave are inert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.execution.device_slots import DeviceSlots
from jaxserve.scheduling.plan import Admission, Row
from jaxserve.steps.sampling.sampler import SamplingNeeds, Variant
from jaxserve.steps.slots import MOVES_A_CALL
from tests.planning.step_times import plan

CONFIG = EngineConfig(num_pages=40, max_slots=64, max_context=256, max_step_tokens=64)


@pytest.mark.parametrize("count", [1, MOVES_A_CALL, MOVES_A_CALL + 5])
def test_moved_slots(count):
    """More moves than fit in a call, between random slots, leave all other slots unchanged."""
    rng = np.random.default_rng(count)
    slots = DeviceSlots(CONFIG, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    slots.state = jax.tree.map(
        lambda leaf: jnp.asarray(
            rng.integers(0, 2 if leaf.dtype == bool else 99, leaf.shape)
        ).astype(leaf.dtype),
        slots.state,
    )
    before = jax.tree.map(np.array, slots.state)
    source, target = rng.permutation(CONFIG.max_slots)[: 2 * count].reshape(2, count)
    slots.apply(plan((), moves=tuple(zip(source.tolist(), target.tolist(), strict=True))))
    expected = jax.tree.map(np.copy, before)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(expected), strict=True):
        new[target] = old[source]
    expected.done[source] = True
    for got, wanted in zip(jax.tree.leaves(slots.state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_needs_follow_the_requests():
    """The needs are those of the rows that sample, after moves, and of a slot's newest request."""
    slots = DeviceSlots(CONFIG, jax.sharding.SingleDeviceSharding(jax.devices()[0]))

    def admission(slot: int, **params) -> Admission:
        tokens = np.array([1], np.int32)
        request = Request(id=f"{slot}", prompt=(1,), params=SamplingParams(**params), arrival_s=0.0)
        return Admission(slot, request, 0, tokens, CONFIG.max_context)

    def needs(*numbers: int, samples: bool = True) -> SamplingNeeds:
        return slots.needs([Row(slot, slot, 0, 1, samples) for slot in numbers])

    new = (admission(0), admission(1, temperature=1.0), admission(2, logprobs=0))
    slots.apply(plan((), admissions=new))
    scored = SamplingNeeds(Variant.FULL, logprobs=True)
    assert needs() == needs(0) == SamplingNeeds(Variant.GREEDY)
    assert needs(0, 1) == SamplingNeeds(Variant.RANDOM)
    assert needs(0, 1, 2) == scored
    assert needs(2, samples=False) == SamplingNeeds(Variant.GREEDY)
    slots.apply(plan((), releases=(0,), moves=((2, 0),)))
    assert needs(0) == scored
    slots.apply(plan((), releases=(0,), admissions=(admission(0),)))
    assert needs(0) == SamplingNeeds(Variant.GREEDY)
