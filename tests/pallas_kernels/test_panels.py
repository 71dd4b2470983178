"""Products with weights in panels agree with NumPy's, and a row's bits depend only on the row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.kernels import build, columns_of, from_panels, matmul, panel_matmul, to_panels
from jaxserve.kernels.matmul import panels
from jaxserve.sharding import make_mesh
from tests.common.closeness import assert_close
from tests.common.instructions import has_bfloat16_products, instruction_sets
from tests.common.tiers import examples

ROUNDS = has_bfloat16_products()  # whether the kernel for this machine rounds inputs to bfloat16
INSTRUCTIONS = instruction_sets()
if ROUNDS:
    INSTRUCTIONS["avx512"] = ("-mno-avx512bf16",)
# Compiled as a whole, since each of their operations alone would be compiled for each shape.
_to_panels = jax.jit(to_panels, static_argnums=1)
_from_panels = jax.jit(from_panels, static_argnums=1)
_panel_matmul = jax.jit(panel_matmul, static_argnames=("columns", "implementation"))

# Rows around a tile and an item; depths around a block; widths around a panel.
ROWS = st.sampled_from([1, 2, 3, 5, 7, 8, 9, 33, 255, 257])
DEPTHS = st.sampled_from([1, 3, 4, 95, 96, 97, 193, 576, 1153])
WIDTHS = st.sampled_from([1, 16, 24, 47, 48, 49, 97, 500])


def _draw(rows: int, depth: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows * depth + width)
    return tuple(rng.standard_normal(s, np.float32) for s in ((rows, depth), (depth, width)))


def _by_kernel(
    x: np.ndarray, weight: np.ndarray, instructions: str, dtype: str = "float32"
) -> np.ndarray:
    flags = (*INSTRUCTIONS[instructions], *panels.STORED[dtype])
    target = build.cpu_target(panels.SOURCE, panels.SYMBOL, flags)
    own = _to_panels(jnp.asarray(weight), dtype)
    return np.asarray(panels.call(target, jnp.asarray(x), own, columns=weight.shape[1]))


@examples(3, 100)
@given(rows=ROWS, depth=DEPTHS, width=WIDTHS, instructions=st.sampled_from([*INSTRUCTIONS, "xla"]))
def test_agrees_with_float64(rows, depth, width, instructions):
    """Any rows, depth and width agree, on each instruction set and in XLA."""
    x, weight = _draw(rows, depth, width)
    if instructions == "xla":
        own = _to_panels(jnp.asarray(weight))
        got = np.asarray(_panel_matmul(x, own, columns=width, implementation="xla"))
    else:
        got = _by_kernel(x, weight, instructions)
    wanted = x.astype(np.float64) @ weight.astype(np.float64)
    assert_close(got, wanted, 2e-6)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_the_bits_of_a_row_are_its_own(instructions):
    """A row has the same bits alone, in any batch, and at any place of it."""
    x, weight = _draw(300, 700, 130)
    whole = _by_kernel(x, weight, instructions)
    for first, count in ((0, 1), (3, 8), (5, 33), (250, 13), (40, 260)):
        some = _by_kernel(x[first : first + count], weight, instructions)
        np.testing.assert_array_equal(some, whole[first : first + count])


def test_the_bits_are_those_of_the_dense_product():
    """A weight in panels gives what the same weight gives as it was."""
    x, weight = _draw(20, 300, 130)
    dense = matmul(jnp.asarray(x), jnp.asarray(weight), implementation="cpu")
    np.testing.assert_array_equal(_by_kernel(x, weight, "native"), dense)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_what_is_not_finite_stays_where_it_belongs(instructions):
    """NaN and infinity in a row or a column are where XLA's product has them, and nowhere else."""
    x, weight = _draw(20, 200, 60)
    x[4, 7], x[9, 0], x[11, 199] = np.nan, np.inf, -np.inf
    weight[3, 50], weight[120, 0], weight[:, 20] = np.nan, np.inf, 0
    got = _by_kernel(x, weight, instructions)
    wanted = np.asarray(matmul(jnp.asarray(x), jnp.asarray(weight), implementation="xla"))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    np.testing.assert_array_equal(np.isposinf(got), np.isposinf(wanted))
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(wanted))
    finite = np.isfinite(wanted)
    np.testing.assert_allclose(got[finite], wanted[finite], rtol=1e-4, atol=1e-4)


def _rounded(array: np.ndarray) -> np.ndarray:
    return np.asarray(jnp.asarray(array, jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_panels_in_bfloat16(instructions):
    """The weight is rounded; inputs are if the processor multiplies bfloat16; sums are not.

    Without rounded inputs, the bits are those of the rounded weight in float32.
    """
    for rows, depth, width in ((1, 98, 100), (9, 576, 48), (40, 1154, 47), (300, 34, 97)):
        x, weight = _draw(rows, depth, width)
        got = _by_kernel(x, weight, instructions, "bfloat16")
        if ROUNDS and instructions == "native":
            wanted = _rounded(x).astype(np.float64) @ _rounded(weight)
            assert_close(got, wanted, 2e-6)
        else:
            np.testing.assert_array_equal(got, _by_kernel(x, _rounded(weight), instructions))


def test_xla_multiplies_panels_in_bfloat16_without_rounding_inputs():
    x, weight = _draw(9, 576, 100)
    own = _to_panels(jnp.asarray(weight), jnp.bfloat16)
    got = _panel_matmul(jnp.asarray(x), own, columns=100, implementation="xla")
    assert_close(got, x.astype(np.float64) @ _rounded(weight), 2e-6)
    chosen = _panel_matmul(jnp.asarray(x), own, columns=100)
    np.testing.assert_array_equal(chosen, _by_kernel(x, weight, "native", "bfloat16"))


def test_the_bits_of_a_row_are_its_own_in_bfloat16():
    """As in float32, on each instruction set."""
    x, weight = _draw(300, 700, 130)
    for instructions in INSTRUCTIONS:
        whole = _by_kernel(x, weight, instructions, "bfloat16")
        for first, count in ((0, 1), (3, 8), (5, 33), (40, 260)):
            some = _by_kernel(x[first : first + count], weight, instructions, "bfloat16")
            np.testing.assert_array_equal(some, whole[first : first + count])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [1, 48, 100])
def test_panels_hold_the_weight(columns, dtype):
    """The weight and its columns come back, and zeros fill the last panel."""
    _, weight = _draw(1, 8, columns)
    weight = jnp.asarray(weight)
    own = _to_panels(weight, dtype)
    np.testing.assert_array_equal(_from_panels(own, columns), weight.astype(dtype))
    index = jnp.asarray([columns - 1, 0])
    for implementation in ("xla", "cpu"):
        got = columns_of(own, index, implementation=implementation)
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, weight.astype(dtype).T[index])
    wide = _from_panels(own, own.shape[0] * panels.PANEL)
    assert not np.asarray(wide)[:, columns:].any()


def test_it_can_be_differentiated():
    """Gradients with respect to both operands equal those of the dense product."""
    x, weight = (jnp.asarray(each) for each in _draw(5, 40, 50))

    def of_panels(x, weight):
        return jnp.sum(jnp.sin(panel_matmul(x, to_panels(weight), columns=50)))

    def of_dense(x, weight):
        return jnp.sum(jnp.sin(x @ weight))

    for got, wanted in zip(
        *(jax.jit(jax.grad(loss, (0, 1)))(x, weight) for loss in (of_panels, of_dense)), strict=True
    ):
        assert_close(got, wanted)


def test_under_a_mesh_xla_serves():
    """XLA can partition its own product, but not the kernel."""
    x, weight = (jnp.asarray(each) for each in _draw(4, 32, 8))
    own = to_panels(weight)
    product = jax.jit(lambda x, own: panel_matmul(x, own, columns=8))
    with jax.set_mesh(make_mesh(tensor=2)):
        assert "custom-call" not in product.lower(x, own).compile().as_text()
    assert "custom-call" in product.lower(x, own).compile().as_text()


@pytest.mark.usefixtures("unchecked_shapes")
def test_shapes_that_contradict_each_other_are_refused():
    """The error names the shapes that fit."""
    x, weight = (jnp.asarray(each) for each in _draw(4, 32, 8))
    with pytest.raises(ValueError, match=r"do not fit 100 columns; pass .*\(3, 32, 48\)"):
        panel_matmul(x, to_panels(weight), columns=100)
