"""Weights in huge pages are copies with the same bytes, which JAX uses as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.models import huge_pages
from jaxserve.models.huge_pages import HugePages

LARGE = (300, 500)
NEEDS_HUGE_PAGES = pytest.mark.skipif(
    not huge_pages.are_available(), reason="this system has no huge pages"
)


@NEEDS_HUGE_PAGES
def test_files_are_read_whole(tmp_path):
    """Files of several dtypes are read, large ones into memory, which JAX does not copy."""
    rng = np.random.default_rng(0)
    whole = [
        rng.standard_normal(LARGE, np.float32),
        rng.standard_normal(LARGE, np.float32).astype(ml_dtypes.bfloat16),
        rng.standard_normal(7, np.float32),
        rng.integers(0, 255, (3, 1 << 20), np.uint8),
    ]
    maps = []
    for i, array in enumerate(whole):
        np.save(tmp_path / f"{i}.npy", array.view(f"u{array.dtype.itemsize}"))
        maps.append(np.load(tmp_path / f"{i}.npy", mmap_mode="r").view(array.dtype))
    found = huge_pages.read(maps)
    assert [array is mapped for array, mapped in zip(found, maps, strict=True)] == [
        False,
        False,
        True,
        False,
    ]
    for array, wanted in zip(found, whole, strict=True):
        np.testing.assert_array_equal(array, wanted)
    own = jax.device_put(found[1], jax.devices()[0])
    assert own.unsafe_buffer_pointer() == found[1].ctypes.data


@NEEDS_HUGE_PAGES
def test_a_file_that_is_cut_off_is_refused(tmp_path):
    """A file that became shorter after it was mapped raises an error."""
    np.save(tmp_path / "a.npy", np.ones(LARGE, np.float32))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    with open(tmp_path / "a.npy", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(ValueError, match="cut off"):
        huge_pages.read([mapped])


@NEEDS_HUGE_PAGES
def test_memory_moves_in_place():
    """What lies in small pages keeps its address and its contents, and is in huge ones after."""
    memory = HugePages(later=True)
    array = memory.copied(jnp.arange(3 << 20, dtype=jnp.float32))
    address = array.unsafe_buffer_pointer()
    memory.move()
    assert array.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(array, np.arange(3 << 20, dtype=np.float32))


@NEEDS_HUGE_PAGES
def test_arrays_do_not_overlap():
    """Arrays from one allocator keep their own contents, also those larger than a mapping."""
    memory = HugePages()
    sizes = [300_000, 20_000_000, 100_000, 70_000, 16_000_000]
    arrays = [memory.copied(jnp.full(size, i, jnp.float32)) for i, size in enumerate(sizes)]
    for i, array in enumerate(arrays):
        assert array.shape == (sizes[i],)
        assert bool((array == i).all())


@NEEDS_HUGE_PAGES
def test_what_is_small_or_sharded_stays():
    """Small arrays and arrays on several devices are returned themselves."""
    memory, small, large = HugePages(), jnp.ones(8), jnp.ones(LARGE)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    spread = jax.device_put(large, jax.NamedSharding(mesh, jax.P("x")))
    assert memory.copied(small) is small
    assert memory.copied(spread) is spread
    assert memory.copied(large) is not large
