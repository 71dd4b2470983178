"""Pages go to the host and come back as they were, whatever happened to the device's meanwhile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.errors import DeviceMemoryError
from jaxserve.core.options import KV_DTYPES
from jaxserve.engine.device_pages import DevicePages
from jaxserve.engine.host_pages import PAGES_A_CALL
from jaxserve.models.batch import KVCache
from sharding import make_mesh

NUM_PAGES = 40
DTYPES = ("float32", "bfloat16", *KV_DTYPES)


def _pages(dtype: str, num_shards: int, num_host_pages: int = NUM_PAGES) -> DevicePages:
    """Two buffers of keys and two of values, and their scales; full of random numbers."""
    rng = np.random.default_rng(0)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if num_shards > 1:
        spec = jax.sharding.PartitionSpec(None, None, "tensor")
        place = jax.sharding.NamedSharding(make_mesh(tensor=num_shards), spec)
    shape = (3, NUM_PAGES, 2, 4, 8)

    def two(shape: tuple[int, ...], dtype: str) -> tuple[jax.Array, ...]:
        values = (20 * rng.standard_normal(shape) for _ in range(2))
        return tuple(jax.device_put(jnp.asarray(each, dtype), place) for each in values)

    leaves = [two(shape, dtype) for _ in "kv"]
    if dtype in KV_DTYPES:
        leaves += [two(shape[:-1], "float32") for _ in "kv"]
    return DevicePages(KVCache(*leaves), place, num_host_pages)


def _contents(pages: DevicePages) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(pages.cache)]


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_come_back_byte_for_byte(dtype, num_shards):
    """Random pages, more than a call holds, to random host pages and back to random pages."""
    pages = _pages(dtype, num_shards)
    before = _contents(pages)
    rng = np.random.default_rng(1)
    count = 2 * PAGES_A_CALL + 3
    source = 1 + rng.permutation(NUM_PAGES - 1)[:count]
    host = rng.permutation(NUM_PAGES)[:count]
    pages.swap(tuple(zip(source.tolist(), host.tolist(), strict=True)), ())
    pages.cache = jax.tree.map(lambda x: jax.device_put(x * 0, x.sharding), pages.cache)
    target = 1 + rng.permutation(NUM_PAGES - 1)[:count]
    pages.swap((), tuple(zip(host.tolist(), target.tolist(), strict=True)))
    for old, new in zip(before, _contents(pages), strict=True):
        assert np.array_equal(new[:, target], old[:, source])
        untouched = np.setdiff1d(np.arange(1, NUM_PAGES), target)
        assert not new[:, untouched].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_page_is_read_and_written_as_bytes(dtype):
    """Also by another cache of the same kind, to which nothing was copied yet."""
    pages, other = _pages(dtype, 1), _pages(dtype, 1)
    before = _contents(pages)
    pages.swap(((3, 7),), ())
    contents = pages.read_host_page(7)
    other.write_host_page(2, contents)
    assert other.read_host_page(2) == contents
    other.swap((), ((2, 9),))
    for old, new in zip(before, _contents(other), strict=True):
        assert np.array_equal(new[:, 9], old[:, 3])


def test_a_host_page_holds_what_came_last():
    """A page that was given up and taken again, before the first copy had arrived."""
    pages = _pages("float32", 1)
    before = _contents(pages)
    pages.swap(((3, 7), (4, 7)), ())
    pages.swap(((5, 7),), ((7, 9),))
    for old, new in zip(before, _contents(pages), strict=True):
        assert np.array_equal(new[:, 9], old[:, 5])


def test_a_host_without_the_memory_says_what_to_give():
    """More than any machine can address."""
    pages = _pages("float32", 1, num_host_pages=10**13)
    with pytest.raises(DeviceMemoryError, match="smaller host_memory"):
        pages.swap(((3, 7),), ((7, 9),))
