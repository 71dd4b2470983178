"""Products with weights agree with NumPy's in float64, and a row's bits depend only on the row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.kernels import grouped_matmul, matmul
from jaxserve.sharding import make_mesh
from tests.common.closeness import assert_close
from tests.common.tiers import examples

# Compiled as a whole, once for all calls of the same shapes.
_matmul = jax.jit(matmul, static_argnames=("transposed", "implementation"))
_grouped_matmul = jax.jit(grouped_matmul, static_argnames="implementation")

# Numbers of rows around a tile, a row block and the threshold for packing; widths around a panel
# and a strip; depths around a block.
ROWS = st.sampled_from([1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 128, 129, 200])
DEPTHS = st.sampled_from([1, 3, 15, 16, 17, 63, 64, 65, 100, 576, 577, 1153])
WIDTHS = st.sampled_from([1, 5, 16, 24, 47, 48, 49, 96, 97, 500, 1600])


def _draw(rows: int, depth: int, width: int, transposed: bool) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(rows * depth + width)
    x = rng.standard_normal((rows, depth), np.float32)
    weight = rng.standard_normal((width, depth) if transposed else (depth, width), np.float32)
    return jnp.asarray(x), jnp.asarray(weight)


@examples(3, 100)
@given(
    rows=ROWS,
    depth=DEPTHS,
    width=WIDTHS,
    transposed=st.booleans(),
    implementation=st.sampled_from(["xla", "cpu"]),
)
def test_agrees_with_float64(rows, depth, width, transposed, implementation):
    """Any rows, depth, width and orientation agree, for each implementation."""
    x, weight = _draw(rows, depth, width, transposed)
    got = np.asarray(_matmul(x, weight, transposed=transposed, implementation=implementation))
    wide = np.asarray(weight, np.float64)
    wanted = np.asarray(x, np.float64) @ (wide.T if transposed else wide)
    assert_close(got, wanted, 2e-6)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_bits_of_a_row_are_its_own(transposed):
    """A row has the same bits alone, with a few rows, and with a packed weight."""
    x, weight = _draw(200, 700, 130, transposed)
    whole = np.asarray(_matmul(x, weight, transposed=transposed, implementation="cpu"))
    for first, count in ((0, 1), (3, 8), (5, 33), (17, 64), (40, 150)):
        part = x[first : first + count]
        some = _matmul(part, weight, transposed=transposed, implementation="cpu")
        np.testing.assert_array_equal(some, whole[first : first + count])


@pytest.mark.parametrize("transposed", [False, True])
def test_it_can_be_differentiated(transposed):
    x, weight = _draw(5, 40, 24, transposed)

    def loss(x, weight, implementation):
        y = matmul(x, weight, transposed=transposed, implementation=implementation)
        return jnp.sum(jnp.sin(y))

    gradients = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    for got, wanted in zip(*(gradients(x, weight, each) for each in ("cpu", "xla")), strict=True):
        assert_close(got, wanted)


def test_several_axes_out():
    """A weight [in, ...out] gives [tokens, ...out] with the numbers of its matrix product."""
    x, weight = _draw(5, 40, 24, False)
    got = matmul(x, weight.reshape(40, 2, 3, 4))
    np.testing.assert_array_equal(got, matmul(x, weight).reshape(5, 2, 3, 4))


def test_what_is_not_finite_stays_in_its_row():
    """NaN in one row does not reach another row, and infinities stay."""
    x, weight = _draw(20, 100, 60, False)
    x = x.at[4, 7].set(jnp.nan).at[9, 0].set(jnp.inf)
    got = np.asarray(matmul(x, weight, implementation="cpu"))
    assert np.isnan(got[4]).all() and np.isinf(got[9]).all()
    others = np.delete(np.arange(20), [4, 9])
    np.testing.assert_array_equal(
        got[others], np.asarray(matmul(x[others], weight, implementation="cpu"))
    )


def _draw_groups(sizes: tuple[int, ...], rows: int, depth: int = 100, width: int = 60):
    rng = np.random.default_rng(rows + depth)
    x = rng.standard_normal((rows, depth), np.float32)
    weight = rng.standard_normal((len(sizes), depth, width), np.float32)
    return jnp.asarray(x), jnp.asarray(weight), jnp.asarray(sizes, jnp.int32)


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
@pytest.mark.parametrize("sizes", [(3,), (0, 5, 0, 70, 1), (0, 0), (9, 9, 9, 9)])
def test_groups_agree_with_float64(sizes, implementation):
    """Each group is multiplied with its matrix, and tokens after the last group get zeros."""
    x, weight, counts = _draw_groups(sizes, rows=sum(sizes) + 2)
    got = np.asarray(_grouped_matmul(x, weight, counts, implementation=implementation))
    matrix = np.repeat(np.arange(len(sizes)), sizes)
    wide = np.asarray(x, np.float64)[: len(matrix), None]
    wanted = (wide @ np.asarray(weight, np.float64)[matrix])[:, 0]
    np.testing.assert_allclose(got[: len(matrix)], wanted, rtol=1e-4, atol=1e-4)
    assert not got[len(matrix) :].any()


def test_the_bits_of_a_row_of_a_group_are_those_of_a_product():
    """Neither the size of its group nor its place among the others changes a row."""
    x, weight, counts = _draw_groups((40, 3, 90), rows=133)
    got = np.asarray(grouped_matmul(x, weight, counts, implementation="cpu"))
    for matrix, rows in enumerate((slice(0, 40), slice(40, 43), slice(43, 133))):
        alone = np.asarray(matmul(x[rows], weight[matrix], implementation="cpu"))
        np.testing.assert_array_equal(got[rows], alone)


def test_groups_can_be_differentiated():
    x, weight, counts = _draw_groups((2, 0, 5), rows=8, depth=24, width=16)

    def loss(x, weight, implementation):
        return jnp.sum(jnp.sin(grouped_matmul(x, weight, counts, implementation=implementation)))

    gradients = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    for got, wanted in zip(*(gradients(x, weight, each) for each in ("cpu", "xla")), strict=True):
        assert_close(got, wanted)


def test_other_precisions_are_served_by_xla():
    """XLA is chosen; the kernel, requested by name, says which precisions it serves."""
    x, weight = (each.astype(jnp.bfloat16) for each in _draw(4, 32, 8, False))
    got = matmul(x, weight, out_dtype=jnp.float32)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.float32(x) @ np.float32(weight), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="serves float32 only"):
        matmul(x, weight, implementation="cpu")


def test_under_a_mesh_xla_serves():
    """XLA can partition its own product, but not the kernel."""
    x, weight = _draw(4, 32, 8, False)
    mesh = make_mesh(tensor=2)
    product = jax.jit(lambda x, weight: matmul(x, weight))
    with jax.set_mesh(mesh):
        assert "custom-call" not in product.lower(x, weight).compile().as_text()
    assert "custom-call" in product.lower(x, weight).compile().as_text()


@pytest.mark.usefixtures("unchecked_shapes")
def test_shapes_that_contradict_each_other_are_refused():
    x, weight = _draw(4, 32, 8, False)
    with pytest.raises(ValueError, match=r"x\(4, 32\) and weight\(32, 8\).*\[out, in\]"):
        matmul(x, weight, transposed=True)
    with pytest.raises(ValueError, match="'cublas' is unknown"):
        matmul(x, weight, implementation="cublas")
    with pytest.raises(ValueError, match=r"sizes\(3,\) do not fit"):
        grouped_matmul(x, weight[None], jnp.ones(3, jnp.int32))
