"""Copies of pages agree with the reference, byte for byte, and happen in place."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import gather_pages, move_pages, scatter_pages
from jaxserve.kernels.page_copy.shapes import TEST_SHAPES, CopyShape
from tests.common.tiers import some

# Compiled once for all calls of the same shapes.
_gather, _scatter, _move = (
    jax.jit(function, static_argnames="implementation")
    for function in (gather_pages, scatter_pages, move_pages)
)

SHAPES = pytest.mark.parametrize("shape", some(TEST_SHAPES), ids=str)
SEEDS = pytest.mark.parametrize("seed", some(range(2)))


@pytest.fixture(params=["xla", "triton_interpreted"])
def implementation(request):
    """Each implementation that is compared with the reference."""
    return request.param


def _random(random: np.random.Generator, dtype: str, *size: int) -> jax.Array:
    """Return random integers, or floats with NaN among them."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(random.integers(-128, 128, size), dtype)
    values = random.standard_normal(size)
    return jnp.asarray(np.where(random.random(size) < 0.1, np.nan, values), dtype)


def _bytes(array: jax.Array | np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def _places(random: np.random.Generator, shape: CopyShape) -> tuple[jax.Array, jax.Array]:
    """Return sources, some of them twice, and as many targets, one of them past the end."""
    order = random.permutation(shape.num_pages)
    source = random.choice(order[: shape.num_pages - shape.count], shape.count)
    target = order[shape.num_pages - shape.count :].copy()
    target[random.integers(shape.count)] = shape.num_pages
    return jnp.asarray(source, jnp.int32), jnp.asarray(target, jnp.int32)


@SHAPES
@SEEDS
def test_pages_are_gathered(implementation, shape, seed):
    """Pages may come in any order and repeat; no other page is read."""
    random = np.random.default_rng(seed)
    pages, (source, _) = _random(random, shape.dtype, *shape.array), _places(random, shape)
    got = _gather(pages, source, implementation=implementation)
    wanted = gather_pages(pages, source, implementation="reference")
    assert got.dtype == pages.dtype
    np.testing.assert_array_equal(_bytes(got), _bytes(wanted))


@SHAPES
@SEEDS
def test_pages_are_scattered(implementation, shape, seed):
    """Each page goes to its place, none goes past the end, and other pages keep their bits."""
    random = np.random.default_rng(seed)
    pages, (_, target) = _random(random, shape.dtype, *shape.array), _places(random, shape)
    values = _random(random, shape.dtype, shape.layers, shape.count, *shape.page)
    got = _scatter(pages, target, values, implementation=implementation)
    wanted = scatter_pages(pages, target, values, implementation="reference")
    np.testing.assert_array_equal(_bytes(got), _bytes(wanted))


@SHAPES
@SEEDS
def test_pages_are_moved(implementation, shape, seed):
    """A page may go to several places; the targets are overwritten, and the rest is unchanged."""
    random = np.random.default_rng(seed)
    pages, places = _random(random, shape.dtype, *shape.array), _places(random, shape)
    got = _move(pages, *places, implementation=implementation)
    wanted = move_pages(pages, *places, implementation="reference")
    assert not np.array_equal(_bytes(got), _bytes(pages))
    np.testing.assert_array_equal(_bytes(got), _bytes(wanted))


@SEEDS
def test_overlapping_moves_go_through_a_copy(implementation, seed):
    """Pages that change places in cycles are gathered first, then scattered."""
    random = np.random.default_rng(seed)
    shape = TEST_SHAPES[0]
    pages = _random(random, shape.dtype, *shape.array)
    source, target = (jnp.asarray(random.permutation(shape.num_pages), jnp.int32) for _ in range(2))
    staged = _gather(pages, source, implementation=implementation)
    got = _scatter(pages, target, staged, implementation=implementation)
    got, pages, source, target = map(np.asarray, (got, pages, source, target))
    np.testing.assert_array_equal(_bytes(got[:, target]), _bytes(pages[:, source]))


def test_every_array_of_a_tree(implementation):
    """Keys and smaller scales are copied in one call, to the host's side and back elsewhere."""
    random = np.random.default_rng(0)
    cache = {
        "keys": _random(random, "int8", 2, 9, 2, 8, 64),
        "scales": _random(random, "float32", 2, 9, 8, 8),
    }
    source, target = np.asarray([3, 8, 1], np.int32), np.asarray([8, 1, 4], np.int32)
    staged = _gather(cache, source, implementation=implementation)
    got = _scatter(cache, target, staged, implementation=implementation)
    got, cache = jax.tree.map(np.asarray, (got, cache))
    for name, pages in cache.items():
        np.testing.assert_array_equal(_bytes(got[name][:, target]), _bytes(pages[:, source]))
        rest = np.setdiff1d(np.arange(9), target)
        np.testing.assert_array_equal(_bytes(got[name][:, rest]), _bytes(pages[:, rest]))


@pytest.mark.parametrize("operation", ["scatter", "move"])
def test_donated_pages_are_written_in_place(operation):
    """The memory is the same, without temporaries of the cache's size."""
    pages = jnp.zeros((2, 400, 2, 8, 32))
    some = jnp.arange(4, dtype=jnp.int32)
    if operation == "scatter":
        function, arguments = scatter_pages, (some, jnp.ones((2, 4, 2, 8, 32)))
    else:
        function, arguments = move_pages, (some, some + 100)
    compiled = jax.jit(function, donate_argnums=0).lower(pages, *arguments).compile()
    sizes = compiled.memory_analysis()
    assert sizes is not None and sizes.alias_size_in_bytes == pages.nbytes
    assert sizes.temp_size_in_bytes < pages.nbytes / 10
    before = pages.unsafe_buffer_pointer()
    assert compiled(pages, *arguments).unsafe_buffer_pointer() == before


def test_what_the_kernel_leaves_to_others():
    """It gives the reason: pages that are too small, of an unknown dtype, or no pages."""
    some = jnp.zeros(3, jnp.int32)
    gather = partial(gather_pages, source=some, implementation="triton_interpreted")
    with pytest.raises(NotImplementedError, match="less than 256 bytes"):
        gather(jnp.zeros((1, 4, 7)))
    with pytest.raises(NotImplementedError, match="not complex64"):
        gather(jnp.zeros((1, 4, 64), "complex64"))
    with pytest.raises(NotImplementedError, match="no pages to copy"):
        gather(jnp.zeros((1, 4, 64)), source=some[:0])
    with pytest.raises(NotImplementedError, match="not for cpu"):
        gather(jnp.zeros((1, 4, 64)), implementation="triton")
    wide = jax.ShapeDtypeStruct((1, 3 * 2**20, 2**10), "int8")
    with pytest.raises(NotImplementedError, match="do not reach"):
        jax.eval_shape(gather, wide)


@pytest.mark.usefixtures("unchecked_shapes")
def test_contradictory_shapes_are_refused():
    pages, some = jnp.zeros((2, 4, 8)), jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match=r"expected \[layers, pages, ...\]"):
        gather_pages(pages, some[None])
    with pytest.raises(ValueError, match=r"expected \[layers, pages, ...\]"):
        move_pages(pages, some, some[:2])
    for values in (jnp.zeros((2, 2, 8)), jnp.zeros((2, 3, 8), jnp.int32)):
        with pytest.raises(ValueError, match="of the same dtype"):
            scatter_pages(pages, some, values)
    with pytest.raises(ValueError, match="unknown"):
        gather_pages(pages, some, implementation="cuda")
