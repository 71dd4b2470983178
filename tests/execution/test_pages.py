"""Pages go to the host and come back unchanged, whatever the device's pages hold meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.errors import HostMemoryError
from jaxserve.core.options import KV_DTYPES
from jaxserve.execution.pages import PAGES_A_CALL, DevicePages, to_host, transit_bytes
from jaxserve.memory.page_pool import fewest_moves
from jaxserve.models.batch import IncomingPages, KVCache
from jaxserve.sharding import make_mesh
from jaxserve.steps.step_function import Shelf, unkept
from tests.common.tiers import some

NUM_PAGES = 40
DTYPES = ("float32", "bfloat16", *KV_DTYPES)


def _pages(
    dtype: str,
    num_shards: int,
    num_host_pages: int = NUM_PAGES,
    layers: tuple[int, ...] = (3, 3),
    **options: Any,
) -> DevicePages:
    """Return buffers of keys, values and scales with this many layers each, of random numbers."""
    rng = np.random.default_rng(0)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if num_shards > 1:
        spec = jax.sharding.PartitionSpec(None, None, "tensor")
        place = jax.sharding.NamedSharding(make_mesh(tensor=num_shards), spec)
    shape = (NUM_PAGES, 2, 4, 8)

    def buffers(shape: tuple[int, ...], dtype: str) -> tuple[jax.Array, ...]:
        values = (20 * rng.standard_normal((num, *shape)) for num in layers)
        return tuple(jax.device_put(jnp.asarray(each, dtype), place) for each in values)

    leaves = [buffers(shape, dtype) for _ in "kv"]
    if dtype in KV_DTYPES:
        leaves += [buffers(shape[:-1], "float32") for _ in "kv"]
    return DevicePages(KVCache(*leaves), place, num_host_pages, **options)


def _contents(pages: DevicePages) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(pages.cache)]


@pytest.mark.parametrize("num_shards", some([1, 2]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_come_back_byte_for_byte(dtype, num_shards):
    """More random pages than fit in a call go to random host pages and back to random pages."""
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


@pytest.mark.parametrize("num_shards", some([1, 2]))
@pytest.mark.parametrize("layers", [(1, 1, 1), (3,)], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("dtype", some(["int8", "bfloat16"]))
def test_a_step_puts_the_pages_that_come_into_every_layer(dtype, layers, num_shards):
    """Each layer's part is written in one program; nothing else changes, not even the null page."""
    pages = _pages(dtype, num_shards, layers=layers)
    before = _contents(pages)
    copies = tuple((host_page, 3 * host_page + 2) for host_page in range(11))
    pages.swap(tuple((device_page, host) for host, device_page in copies), ())
    pages.cache = jax.tree.map(lambda x: jax.device_put(x * 0, x.sharding), pages.cache)

    def step(cache: KVCache, incoming: IncomingPages) -> KVCache:
        for layer in range(3):
            cache = incoming.put(cache, layer, incoming.fetch(layer))
        return cache

    place = pages.cache.k_pages[0].sharding
    mesh = place.mesh if num_shards > 1 else None
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        incoming = pages.incoming(copies, 16)
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(incoming.values)}
        assert kinds == {"pinned_host"}
        pages.cache = jax.jit(step, donate_argnums=0, out_shardings=place)(pages.cache, incoming)
    device_pages = [page for _, page in copies]
    for old, new in zip(before, _contents(pages), strict=True):
        assert new[:, device_pages].tobytes() == old[:, device_pages].tobytes()
        assert not np.delete(new, device_pages, axis=1).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_page_is_read_and_written_as_bytes(dtype):
    """The bytes also fit another cache of the same layout, to which no page was copied yet."""
    pages, other = _pages(dtype, 1), _pages(dtype, 1)
    before = _contents(pages)
    pages.swap(((3, 7),), ())
    contents = pages.host.read_bytes(7)
    other.host.write_bytes(2, contents)
    assert other.host.read_bytes(2) == contents
    other.swap((), ((2, 9),))
    for old, new in zip(before, _contents(other), strict=True):
        assert np.array_equal(new[:, 9], old[:, 3])


def test_a_host_page_holds_what_came_last():
    """A host page that is freed and allocated again before the first copy has arrived."""
    pages = _pages("float32", 1)
    before = _contents(pages)
    pages.swap(((3, 7), (4, 7)), ())
    pages.swap(((5, 7),), ((7, 9),))
    for old, new in zip(before, _contents(pages), strict=True):
        assert np.array_equal(new[:, 9], old[:, 5])


def test_a_host_without_the_memory_says_what_to_give():
    """The request is for more memory than any machine can address."""
    pages = _pages("float32", 1, num_host_pages=10**13)
    with pytest.raises(HostMemoryError, match="smaller host_memory"):
        pages.swap(((3, 7),), ((7, 9),))


class _Arrivals:
    """Pages arrive on the host once `may` is set; with `fails`, their copies fail then."""

    def __init__(self) -> None:
        self.may, self.fails = threading.Event(), False

    def __call__(self, pieces: Sequence[jax.Array]) -> np.ndarray:
        assert {piece.sharding.memory_kind for piece in pieces} == {"pinned_host"}
        self.may.wait()
        if self.fails:
            raise RuntimeError("the copy failed")
        return to_host(pieces)


@pytest.mark.parametrize("num_shards", some([1, 2]))
def test_pages_in_transit_to_the_host_are_bounded(num_shards):
    """They wait in pinned memory; a call beyond the bound waits until the oldest has arrived."""
    pages = _pages("float32", num_shards)
    arrivals, most = _Arrivals(), 2 * PAGES_A_CALL * pages.host.entry_bytes
    pages = _pages("float32", num_shards, max_leaving_bytes=most, read=arrivals)
    before = _contents(pages)
    copies = tuple((page + 1, page) for page in range(3 * PAGES_A_CALL))
    pages.swap(copies[: 2 * PAGES_A_CALL], ())
    assert not any(map(pages.host.has_arrived, range(2 * PAGES_A_CALL)))
    third = threading.Thread(target=pages.swap, args=(copies[2 * PAGES_A_CALL :], ()))
    third.start()
    third.join(0.1)
    assert third.is_alive()
    arrivals.may.set()
    third.join()
    contents = b"".join(x[:, 3 * PAGES_A_CALL].tobytes() for x in before)
    assert pages.host.read_bytes(3 * PAGES_A_CALL - 1) == contents


def test_pages_in_transit_fit_beside_the_pool():
    """In both directions together they take less than the 8 % that a pool leaves free."""
    for pool_bytes in (2 << 30, 6 << 30, 40 << 30, 100 << 30):
        assert 2 * transit_bytes(pool_bytes) < pool_bytes * 0.08 / 0.92
    assert transit_bytes(100 << 30) == 1 << 30
    assert transit_bytes(1) == 64 << 20


def test_a_page_whose_copy_is_on_its_way_or_failed_has_not_arrived():
    """Nothing waits for it; other contents may be written there."""
    arrivals = _Arrivals()
    pages = _pages("float32", 1, read=arrivals)
    contents = pages.host.read_bytes(0)
    pages.swap(((3, 7),), ())
    assert not pages.host.has_arrived(7) and pages.host.has_arrived(6)
    arrivals.fails = True
    arrivals.may.set()
    with pytest.raises(RuntimeError, match="the copy failed"):
        pages.swap(((3, 8),), ((8, 9),))
    assert not pages.host.has_arrived(7)
    pages.host.write_bytes(7, contents)
    assert pages.host.has_arrived(7) and pages.host.read_bytes(7) == contents


class _Buffer:
    """A buffer of a cache that is computed later; it counts the waits for it."""

    def __init__(self, array: jax.Array, waits: list[int], num_calls: int):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self._waits, self._num_calls = waits, num_calls

    def block_until_ready(self) -> _Buffer:
        if self._num_calls not in self._waits:
            self._waits.append(self._num_calls)
        return self


class _WatchedShelf:
    """A shelf whose scatters return `_Buffer`s.

    Attributes:
      waits: the calls of `scatter` after which the result was waited for.
    """

    def __init__(self, inner: Shelf):
        self.waits: list[int] = []
        self._inner = inner
        self._num_calls = 0

    def function(self, name: str, *args: Any, **options: Any) -> Any:
        function = self._inner.function(name, *args, **options)
        if name != "scattered":
            return function

        def scatter(cache: KVCache, *more: Any) -> KVCache:
            arrays = jax.tree.map(lambda each: getattr(each, "array", each), cache)
            self._num_calls += 1
            later = function(arrays, *more)
            return jax.tree.map(lambda each: _Buffer(each, self.waits, self._num_calls), later)

        return scatter


@pytest.mark.parametrize(("num_calls", "waits"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (5, [])])
def test_pages_come_from_the_host_in_parts(num_calls: int, waits: list[int]):
    """Five calls copy them, of which as many are on their way at once as have room."""
    plain = _pages("float32", 1)
    before = _contents(plain)
    page_bytes = sum(leaf.nbytes for leaf in before) // NUM_PAGES
    shelf = _WatchedShelf(unkept(plain.place))
    most = num_calls * PAGES_A_CALL * page_bytes
    pages = _pages("float32", 1, shelf=shelf, max_incoming_bytes=most)
    copies = tuple((page, page) for page in range(1, NUM_PAGES))
    pages.swap(copies, copies)
    assert shelf.waits == waits
    for old, new in zip(before, jax.tree.leaves(pages.cache), strict=True):
        assert np.array_equal(np.asarray(new.array)[:, 1:], old[:, 1:])  # beside the null page


@pytest.mark.parametrize("num_pages", [6, 60])
def test_an_allocation_that_fails_halfway_changes_nothing(num_pages):
    """The buffers that were already copied are copied back."""
    calls = []

    def fails_third(buffer, source):
        calls.append(source)
        if len(calls) == 3:
            raise RuntimeError("RESOURCE_EXHAUSTED: made up")
        return buffer[:, source]

    pages, owned = _pages("float32", 1, copy=fails_third), [1, 4, 7, 8]
    before = _contents(pages)
    with pytest.raises(RuntimeError, match="made up"):
        pages.resize(num_pages, fewest_moves(owned, num_pages))
    assert len(calls) == 5 and pages.num_pages == NUM_PAGES
    for was, now in zip(before, _contents(pages), strict=True):
        np.testing.assert_array_equal(now[:, owned], was[:, owned])
