"""Low-rank changes of products: each token's own adapter, and bits that depend on nothing else."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_low_rank

# tokens, in, rank, out, adapters
SHAPES = [(1, 32, 4, 48, 1), (3, 96, 16, 200, 2), (20, 65, 48, 1100, 5), (40, 160, 18, 33, 3)]


def _arguments(shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
    tokens, width, rank, out, num = shape
    rng = np.random.default_rng(tokens)

    def normal(*shape: int) -> jax.Array:
        return jnp.array(rng.standard_normal(shape, np.float32))

    adapter = jnp.array(rng.integers(-1, num, tokens), jnp.int32)
    arrays = normal(tokens, out), normal(tokens, width), normal(num, width, rank)
    return *arrays, normal(num, rank, out), normal(num), adapter


def _expected(
    out: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array, scale: jax.Array, adapter: jax.Array
) -> np.ndarray:
    """Return the definition in float64."""
    total = np.array(out, np.float64)
    for token, own in enumerate(np.asarray(adapter)):
        if own >= 0:
            inner = np.asarray(x, np.float64)[token] @ np.asarray(a, np.float64)[own]
            total[token] += float(scale[own]) * inner @ np.asarray(b, np.float64)[own]
    return total


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_token_goes_through_its_own_adapter(shape, implementation):
    arguments = _arguments(shape)
    found = jax.jit(lambda *each: add_low_rank(*each, implementation=implementation))(*arguments)
    np.testing.assert_allclose(found, _expected(*arguments), rtol=2e-4, atol=2e-3)


def test_bits_do_not_depend_on_other_tokens():
    """Also where a chunk of tokens is another one, and where the work is cut otherwise."""
    out, x, a, b, scale, adapter = _arguments(SHAPES[2])
    function = jax.jit(add_low_rank)
    together = np.asarray(function(out, x, a, b, scale, adapter))
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 15):
        some = rng.permutation(len(adapter))[:size]
        alone = function(out[some], x[some], a, b, scale, adapter[some])
        np.testing.assert_array_equal(together[some], alone)


def test_tokens_without_an_adapter_stay_as_they_are():
    out, x, a, b, scale, adapter = _arguments(SHAPES[1])
    found = jax.jit(add_low_rank)(out, x, a, b, scale, jnp.full_like(adapter, -1))
    np.testing.assert_array_equal(found, out)


def test_it_is_differentiable():
    *arrays, adapter = _arguments(SHAPES[1])

    def total(*arrays: jax.Array, implementation: str) -> jax.Array:
        function: Any = partial(add_low_rank, adapter=adapter, implementation=implementation)
        return (function(*arrays) ** 2).sum()

    wanted, found = (
        jax.grad(lambda *each, way=way: total(*each, implementation=way), argnums=(0, 1, 2, 3))(
            *arrays
        )
        for way in ("xla", "cpu")
    )
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-2)


@pytest.mark.usefixtures("unchecked_shapes")
def test_shapes_that_do_not_fit_are_refused():
    out, x, a, b, scale, adapter = _arguments(SHAPES[1])
    with pytest.raises(ValueError, match="do not fit"):
        add_low_rank(out, x, a, b[:, :3], scale, adapter)
