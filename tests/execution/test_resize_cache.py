"""The device's pages after a resize, for every layer, layout and shard."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from jaxserve.core.config import EngineConfig
from jaxserve.execution.device import DeviceExecutor
from jaxserve.memory.page_pool import fewest_moves
from jaxserve.models.batch import empty_cache
from jaxserve.sharding import make_mesh, state_shardings
from jaxserve.steps.programs import Programs
from jaxserve.steps.step_function import Placement
from jaxserve.testing.tiny import MAX_CONTEXT, tiny_llama
from tests.common.tiers import some
from tests.planning.step_times import plan

NUM_PAGES = 9
OWNED = [1, 4, 7, 8]


def _executor(layout: str, num_shards: int, dtype: str = "float32") -> DeviceExecutor:
    """Return an executor with random numbers in its cache and all pages in its slots' tables."""
    graphdef, params = nnx.split(tiny_llama())
    if num_shards > 1:
        params = jax.device_put(params, state_shardings(params, make_mesh(tensor=num_shards)))
    place = Placement.like(jax.tree.leaves(params)[0].sharding)
    config = EngineConfig(
        page_size=8, num_pages=NUM_PAGES, max_slots=2, max_context=MAX_CONTEXT, max_step_tokens=8
    )
    cache = empty_cache(tiny_llama().config, NUM_PAGES, 8, dtype, layout, num_shards=num_shards)
    rng = np.random.default_rng(0)
    cache = jax.tree.map(
        lambda x: jax.device_put(rng.normal(0, 20, x.shape).astype(x.dtype), place.pages), cache
    )
    programs = Programs(graphdef, config, tiny_llama().config, place)
    executor = DeviceExecutor(config, programs, params, cache)
    with place.in_force():
        executor.slots.apply(plan((), page_updates=[(0, i, i) for i in range(NUM_PAGES)]))
    return executor


def _contents(executor: DeviceExecutor) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(executor.pages.cache)]


@pytest.mark.parametrize("dtype", some(["int8", "float32", "float8_e4m3fn"]))
@pytest.mark.parametrize("num_shards", some([1, 2, 4], 0, 1))
@pytest.mark.parametrize("layout", ["unrolled", "scanned"])
def test_pages_are_where_the_moves_brought_them(layout, num_shards, dtype):
    """This holds for every layer, shard and page table; the old buffers are gone."""
    executor = _executor(layout, num_shards, dtype)
    before, old = _contents(executor), jax.tree.leaves(executor.pages.cache)
    num_buffers = 4 if layout == "unrolled" else 2
    # One scale per eight one-byte numbers takes half of the bytes of the numbers in addition.
    is_scaled = dtype != "float32"
    assert len(old) == (1 + is_scaled) * num_buffers
    assert executor.num_buffers == num_buffers + is_scaled * num_buffers // 2
    moves = fewest_moves(OWNED, 6)
    assert moves == [(7, 2), (8, 3)]
    executor.resize(6, moves)
    assert executor.config.num_pages == 6 and all(buffer.is_deleted() for buffer in old)
    for was, now in zip(before, _contents(executor), strict=True):
        np.testing.assert_array_equal(now, was[:, [0, 1, 7, 8, 4, 5]])
    table = np.array(executor.slots.state.page_table)[0, :NUM_PAGES]
    np.testing.assert_array_equal(table, [0, 1, 2, 3, 4, 5, 0, 2, 3])
    shrunk, shardings = _contents(executor), [x.sharding for x in old]
    executor.resize(20, ())
    for was, now in zip(shrunk, _contents(executor), strict=True):
        np.testing.assert_array_equal(now[:, :6], was)
    assert [x.sharding for x in jax.tree.leaves(executor.pages.cache)] == shardings
    executor.close()
