"""The GPU's product of groups agrees with NumPy's in float64 for any sizes of groups."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import grouped_matmul
from jaxserve.kernels.grouped_matmul.shapes import (
    TEST_SHAPES,
    GroupedShape,
    make_inputs,
    random_sizes,
)
from jaxserve.kernels.grouped_matmul.triton import tiling
from tests.common.closeness import assert_close
from tests.common.tiers import some

# Relative norm of the error against float64: sums are in float32, and rounded once.
ALLOWED = {"float32": 1e-6, "float16": 5e-4, "bfloat16": 4e-3}


def _sizes(shape: GroupedShape) -> list[np.ndarray]:
    """Return random sizes, one group with all tokens, and no tokens in any group."""
    whole = np.zeros(shape.matrices, np.int32)
    whole[-1] = shape.tokens
    return [*(random_sizes(shape, seed) for seed in range(4)), whole, np.zeros_like(whole)]


@pytest.mark.parametrize("shape", some(TEST_SHAPES), ids=str)
def test_groups_of_any_sizes_agree_with_float64(shape):
    """Each token is multiplied with its matrix alone, and tokens without a group get zeros."""
    function, _ = shape.call(implementation="triton_interpreted")
    run = jax.jit(function)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((shape.tokens, shape.inputs)).astype(shape.dtype)
    weight = rng.standard_normal((shape.matrices, shape.inputs, shape.columns)).astype(shape.dtype)
    for sizes in _sizes(shape):
        got = np.asarray(run(x=x, weight=weight, sizes=sizes), np.float64)
        matrix = np.repeat(np.arange(shape.matrices), sizes)
        wanted = np.zeros_like(got)
        for own in np.unique(matrix):
            (rows,) = np.nonzero(matrix == own)
            wanted[rows] = x[rows].astype(np.float64) @ weight[own].astype(np.float64)
        assert_close(got, wanted, ALLOWED[shape.dtype])
        assert not got[len(matrix) :].any()


@pytest.mark.release
@pytest.mark.parametrize("shape", TEST_SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch(shape):
    """Fewer tokens, in groups of other sizes, have the bits that they have among all."""
    run = jax.jit(shape.call(implementation="triton_rows_interpreted")[0])
    inputs = make_inputs(shape, sizes := random_sizes(shape, 0))
    whole = np.asarray(run(**inputs))
    after = shape.tokens - sizes.sum()
    matrix = np.repeat(np.arange(shape.matrices + 1), [*sizes, after])
    random = np.random.default_rng(0)
    for count in (1, 2, shape.tokens // 2, shape.tokens - 1):
        chosen = np.sort(random.choice(shape.tokens, count, replace=False))
        own = np.bincount(matrix[chosen], minlength=shape.matrices + 1)[:-1]
        got = run(inputs["x"][chosen], inputs["weight"], jnp.asarray(own, jnp.int32))
        np.testing.assert_array_equal(np.asarray(got), whole[chosen])


def test_the_tile_of_invariant_rows_follows_from_the_weight():
    """The number of tokens changes it only without `batch_invariant`."""
    for itemsize in (2, 4):
        fixed = {tiling(n, (8, 64, 96), itemsize, batch_invariant=True) for n in (1, 90, 4096)}
        assert len(fixed) == 1
    assert len({tiling(n, (8, 64, 96), 2).tokens for n in (1, 90, 4096)}) == 3


def test_the_grid_has_room_for_any_sizes():
    """No sizes of groups need more tiles, and some need all of them."""
    random = np.random.default_rng(0)
    for tokens, matrices in random.integers(1, 300, (50, 2)).tolist():
        tile = tiling(tokens, (matrices, 64, 64), 2, batch_invariant=tokens % 2 == 0)
        largest = tile.num_tiles(tokens, matrices)
        for concentration in (0.01, 0.1, 1.0, 100.0):
            shares = random.dirichlet(np.full(matrices + 1, concentration))
            sizes = random.multinomial(tokens, shares)
            assert np.sum(-(-sizes // tile.tokens)) <= largest
        worst = np.ones(min(tokens, matrices + 1), int)
        worst[0] += tokens - len(worst)
        assert np.sum(-(-worst // tile.tokens)) == largest


@pytest.mark.release
def test_gradients_are_those_of_xla():
    """Training through the kernel has XLA's gradients."""
    shape = TEST_SHAPES[1]
    inputs = make_inputs(shape, random_sizes(shape, 0))

    def loss(x, weight, implementation):
        product = partial(grouped_matmul, implementation=implementation)
        return jnp.sum(jnp.sin(product(x, weight, inputs["sizes"])))

    gradients = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    ours, right = (
        gradients(inputs["x"], inputs["weight"], name) for name in ("triton_interpreted", "xla")
    )
    for got, wanted in zip(ours, right, strict=True):
        assert_close(got, wanted)


def test_what_is_refused():
    """The kernel that is asked for by name says what it does not serve."""
    x, weight, sizes = jnp.ones((2, 8)), jnp.ones((3, 8, 4)), jnp.ones(3, jnp.int32)
    with pytest.raises(NotImplementedError, match="not for cpu"):
        grouped_matmul(x, weight, sizes, implementation="triton")
    product = partial(grouped_matmul, implementation="triton_interpreted")
    with pytest.raises(NotImplementedError, match="not float32 and bfloat16"):
        product(x, weight.astype(jnp.bfloat16), sizes)
    with pytest.raises(NotImplementedError, match="is empty"):
        product(x[:0], weight, sizes)
