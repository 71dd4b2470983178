"""States go from slots to snapshots, to the host and back unchanged."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxserve.core.config import EngineConfig
from jaxserve.execution.device_slots import DeviceStates
from jaxserve.execution.pages import DevicePages
from jaxserve.memory.snapshots import HostStateCopy, StateCopy
from jaxserve.models.batch import KVCache
from jaxserve.sharding import make_mesh
from jaxserve.steps.step_function import unkept
from tests.common.tiers import some

CONFIG = EngineConfig(page_size=4, num_pages=9, max_slots=5, max_context=64, max_step_tokens=8)
NUM_ENTRIES, NUM_HOST = 2, 3


def _cache(places: KVCache, num_slots: int, num_pages: int, seed: int) -> KVCache:
    """Return a cache of random numbers: two layers of attention, and three with states."""
    rng = np.random.default_rng(seed)

    def random(num: int, shape: tuple[int, ...], place: Any) -> tuple[jax.Array, ...]:
        values = [rng.standard_normal(shape).astype(np.float32) for _ in range(num)]
        return tuple(jax.device_put(each, place) for each in values)

    pages = [random(2, (1, num_pages, 2, 4, 8), places.k_pages) for _ in "kv"]
    shapes = {"window": (1, num_slots, 6, 3), "memory": (1, num_slots, 4, 5)}
    states = {name: random(3, shape, places.states[name]) for name, shape in shapes.items()}
    return KVCache(*pages, states=states)


@pytest.mark.parametrize("num_shards", some([1, 2]))
def test_states_come_back_bit_for_bit(num_shards):
    """More states than the device has entries for, in one plan; entries are used again at once."""
    whole: Any = SingleDeviceSharding(jax.devices()[0])
    split = whole
    if num_shards > 1:
        mesh = make_mesh(tensor=num_shards)
        whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, None, "tensor"))
    places = KVCache(split, split, split, split, {"window": whole, "memory": split})
    cache = _cache(places, CONFIG.max_slots, CONFIG.num_pages, seed=0)
    before = [np.array(leaf) for leaf in jax.tree.leaves(cache)]
    shelf = unkept(whole)
    pages = DevicePages(cache, split)
    snapshots = _cache(places, NUM_ENTRIES, NUM_ENTRIES, seed=1)
    states = DeviceStates(CONFIG, places, shelf, snapshots, NUM_HOST)
    for _, prepare in states.preparations(pages):
        prepare()
    with nullcontext() if num_shards == 1 else jax.set_mesh(mesh):
        out = [
            copy
            for i in range(NUM_HOST)
            for copy in (StateCopy(i, 2 * i + 1, 1), HostStateCopy(1, i, goes_out=True))
        ]
        states.save(pages, [*out, StateCopy(4, 8, 1)])
        pages.replace(jax.tree.map(lambda x: jax.device_put(0 * x, x.sharding), pages.cache))
        states.save(pages, [HostStateCopy(0, 1, goes_out=False)])
        restores = [StateCopy(0, 1, 2, True), StateCopy(2, 3, 0), StateCopy(3, 4, 1)]
        states.restore(pages, restores)
    sources = {0: (2, 5), 2: (1, 3), 3: (4, 8)}  # by the slot restored: the slot and page saved
    after = [np.array(leaf) for leaf in jax.tree.leaves(pages.cache)]
    num_pages = len(jax.tree.leaves(pages.cache.pages))
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        for copy in restores:
            slot, page = sources[copy.slot]
            at, was = (copy.page, page) if i < num_pages else (copy.slot, slot)
            assert new[:, at].tobytes() == old[:, was].tobytes()
    states.delete()
    pages.delete()
