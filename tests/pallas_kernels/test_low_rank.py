"""Low-rank changes of products: each token's own adapter, and bits that depend on nothing else."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import add_low_rank
from tests.common.tiers import some

# tokens, in, rank, out, adapters
SHAPES = [(1, 32, 4, 48, 1), (3, 96, 16, 200, 2), (20, 65, 48, 1100, 5), (40, 160, 18, 33, 3)]
# The spans of columns of a weight that is made of three modules: in one piece each, and in several.
SPANS = {
    200: ((0, 120), (1, 40), (2, 40)),
    1100: ((0, 1), (2, 1030), (0, 64), (1, 5)),
    33: ((1, 7), (0, 7), (1, 17), (2, 2)),
}


def _arguments(
    shape: tuple[int, ...], changes: int = 1, dtype: str = "float32"
) -> tuple[jax.Array, ...]:
    tokens, width, rank, out, num = shape
    rng = np.random.default_rng(tokens)

    def normal(*shape: int) -> jax.Array:
        return jnp.array(rng.standard_normal(shape, np.float32))

    adapter = jnp.array(rng.integers(-1, num, tokens), jnp.int32)
    arrays = normal(tokens, out), normal(tokens, width)
    matrices = normal(num, width, changes * rank), normal(num, rank, out)
    return *arrays, *(each.astype(dtype) for each in matrices), normal(num), adapter


def _expected(
    out: jax.Array,
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    scale: jax.Array,
    adapter: jax.Array,
    spans: tuple[tuple[int, int], ...] = (),
) -> np.ndarray:
    """Return the definition in float64."""
    total = np.array(out, np.float64)
    x, a, b, scale = (np.asarray(each, np.float64) for each in (x, a, b, scale))
    rank = b.shape[1]
    for token, own in enumerate(np.asarray(adapter)):
        if own >= 0:
            inner = x[token] @ a[own]
            end = 0
            for change, size in spans or [(0, b.shape[-1])]:
                begin, end = end, end + size
                columns = b[own][:, begin:end]
                part = inner[change * rank : (change + 1) * rank]
                total[token, begin:end] += scale[own] * part @ columns
    return total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["cpu", "xla"])
# The last shape has tokens of several adapters, which are out of order.
@pytest.mark.parametrize("shape", some(SHAPES, 3, are_tuples=True))
def test_each_token_goes_through_its_own_adapter(shape, implementation, dtype):
    arguments = _arguments(shape, dtype=dtype)
    found = jax.jit(lambda *each: add_low_rank(*each, implementation=implementation))(*arguments)
    np.testing.assert_allclose(found, _expected(*arguments), rtol=2e-4, atol=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["cpu", "xla"])
@pytest.mark.parametrize("shape", some(SHAPES[1:], are_tuples=True))
def test_columns_go_with_the_change_of_their_own_module(shape, implementation, dtype):
    spans = SPANS[shape[3]]
    arguments = _arguments(shape, changes=3, dtype=dtype)
    function = partial(add_low_rank, spans=spans, implementation=implementation)
    found = jax.jit(function)(*arguments)
    np.testing.assert_allclose(found, _expected(*arguments, spans), rtol=2e-4, atol=2e-3)


def test_bfloat16_is_widened_exactly():
    """The bits are those of the same numbers in float32."""
    out, x, a, b, *others = _arguments(SHAPES[2], changes=3, dtype="bfloat16")
    function = jax.jit(partial(add_low_rank, spans=SPANS[SHAPES[2][3]], implementation="cpu"))
    wanted = function(out, x, a.astype(jnp.float32), b.astype(jnp.float32), *others)
    np.testing.assert_array_equal(function(out, x, a, b, *others), wanted)


@pytest.mark.parametrize("changes", [1, 3])
def test_bits_do_not_depend_on_other_tokens(changes):
    """Also where a chunk of tokens is another one, and where the work is cut otherwise."""
    out, x, a, b, scale, adapter = _arguments(SHAPES[2], changes=changes)
    spans = SPANS[SHAPES[2][3]] if changes == 3 else ()
    function = jax.jit(partial(add_low_rank, spans=spans))
    together = np.asarray(function(out, x, a, b, scale, adapter))
    rng = np.random.default_rng(0)
    out, x, adapter = (np.asarray(each) for each in (out, x, adapter))
    for size in (1, 2, 7, 15):
        some = rng.permutation(len(adapter))[:size]
        alone = function(out[some], x[some], a, b, scale, adapter[some])
        np.testing.assert_array_equal(together[some], alone)


def test_tokens_without_an_adapter_stay_as_they_are():
    out, x, a, b, scale, adapter = _arguments(SHAPES[1])
    found = jax.jit(add_low_rank)(out, x, a, b, scale, jnp.full_like(adapter, -1))
    np.testing.assert_array_equal(found, out)


@pytest.mark.parametrize("changes", some([1, 3]))
def test_it_is_differentiable(changes):
    *arrays, adapter = _arguments(SHAPES[1], changes=changes)
    spans = SPANS[SHAPES[1][3]] if changes == 3 else ()

    def total(*arrays: jax.Array, implementation: str) -> jax.Array:
        function: Any = partial(
            add_low_rank, adapter=adapter, spans=spans, implementation=implementation
        )
        return (function(*arrays) ** 2).sum()

    gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)), static_argnames="implementation")
    wanted, found = (gradients(*arrays, implementation=way) for way in ("xla", "cpu"))
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-2)


@pytest.mark.usefixtures("unchecked_shapes")
def test_shapes_that_do_not_fit_are_refused():
    out, x, a, b, scale, adapter = _arguments(SHAPES[1])
    with pytest.raises(ValueError, match="do not fit"):
        add_low_rank(out, x, a, b[:, :3], scale, adapter)
    for spans in (((0, 100),), ((0, 100), (1, 100)), ((0, 201),)):
        with pytest.raises(ValueError, match="do not fit"):
            add_low_rank(out, x, a, b, scale, adapter, spans=spans)
