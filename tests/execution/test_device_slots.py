"""Slots that move keep all their state, and what they leave behind is inert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.execution.device_slots import DeviceSlots
from jaxserve.steps.slots import MOVES_A_CALL
from tests.planning.step_times import plan

CONFIG = EngineConfig(num_pages=40, max_slots=64, max_context=256, max_step_tokens=64)


@pytest.mark.parametrize("count", [1, MOVES_A_CALL, MOVES_A_CALL + 5])
def test_moved_slots(count):
    """More moves than a call has, between random slots; all others stay as they are."""
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
