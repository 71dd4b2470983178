"""Products on the CPU that leave out rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import matmul, panel_matmul, quantised_matmul, to_panels
from jaxserve.kernels.dispatch import only_rows
from jaxserve.kernels.quantised_matmul import quantise
from tests.common.tiers import some

DEPTH, WIDTH = 100, 64
Product = Callable[[jax.Array], jax.Array]


def _product(kind: str) -> Product:
    weight = np.random.default_rng(0).standard_normal((DEPTH, WIDTH), np.float32)
    if kind == "int8":
        packed = quantise(jnp.asarray(weight.T), bits=8, group=32)
        return partial(quantised_matmul, weight=packed, rounds_activations="groups")
    if kind == "panels":
        return partial(panel_matmul, panels=to_panels(jnp.asarray(weight)), columns=WIDTH)
    return partial(matmul, weight=jnp.asarray(weight))


@pytest.mark.parametrize("kind", ["dense", "panels", "int8"])
@pytest.mark.parametrize("rows", some([9, 1, 70, 300]))
def test_rows_that_are_left_out_are_zeros(kind, rows):
    """The other rows have the bits that they have in the whole product."""
    rng = np.random.default_rng(rows)
    x, product = jnp.asarray(rng.standard_normal((rows, DEPTH), np.float32)), _product(kind)

    @jax.jit
    def some_rows(x, is_computed):
        with only_rows(is_computed):
            return product(x, implementation="cpu")

    whole = np.asarray(jax.jit(partial(product, implementation="cpu"))(x))
    for is_computed in (
        np.ones(rows, bool),
        np.zeros(rows, bool),
        np.arange(rows) < rows // 2,
        rng.random(rows) < 0.6,
    ):
        got = np.asarray(some_rows(x, is_computed))
        np.testing.assert_array_equal(got, np.where(is_computed[:, None], whole, 0))


def test_products_of_other_rows_are_whole():
    """A block is about products of as many rows as it names, and none after it."""
    x, product = jnp.ones((4, DEPTH)), _product("panels")
    with only_rows(jnp.zeros(3, bool)):
        assert np.asarray(product(x)).all()
    with only_rows(jnp.zeros(4, bool)):
        pass
    assert np.asarray(product(x)).all()
