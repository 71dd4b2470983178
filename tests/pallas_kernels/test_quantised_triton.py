"""The Triton kernel of products with packed weights agrees with NumPy's, in the interpreter."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.kernels import dequantise, quantised_matmul
from jaxserve.kernels.cross import targeting
from jaxserve.kernels.quantised_matmul import pack
from jaxserve.kernels.quantised_matmul.packing import rounded_activations
from jaxserve.kernels.quantised_matmul.shapes import FORMATS
from tests.common.closeness import assert_close
from tests.common.tiers import examples, some

# Relative norm of the error: weights and results are rounded to the activations' dtype.
ALLOWED = {"bfloat16": 8e-3, "float16": 1e-3}
# Tokens around the tiles and the border between few and many; inputs around blocks and splits.
TOKENS = st.sampled_from([1, 3, 16, 17, 33, 64, 65, 130])
DEPTHS = st.sampled_from([5, 64, 100, 192, 1024, 1100])
WIDTHS = st.sampled_from([1, 16, 70, 150])

# Compiled as a whole, since each of its operations alone would be compiled for each shape.
_product = jax.jit(
    partial(quantised_matmul, implementation="triton_interpreted"),
    static_argnames=("rounds_activations", "out_dtype"),
)
_dequantise = jax.jit(dequantise)
_rounded_activations = jax.jit(rounded_activations, static_argnums=1)


@partial(jax.jit, static_argnums=1)
def _packed(weight, format: str):
    return FORMATS[format].packed(weight)


def _draw(tokens: int, depth: int, width: int, format: str, dtype: str = "bfloat16"):
    rng = np.random.default_rng(tokens * depth + width)
    x = jnp.asarray(rng.standard_normal((tokens, depth)), dtype)
    weight = rng.standard_normal((width, depth), np.float32)
    return x, weight, _packed(weight, format)


def _times(x, packed, format: str, **options):
    return _product(x, packed, rounds_activations=FORMATS[format].rounds_activations, **options)


def _wanted(x, packed, format: str) -> np.ndarray:
    x = x.astype(jnp.float32)
    if FORMATS[format].rounds_activations:
        x = _rounded_activations(x, x.shape[1])
    numbers = np.asarray(_dequantise(packed), np.float64)[:, : x.shape[1]]
    return np.asarray(x, np.float64) @ numbers.T


@examples(3, 100)
@given(
    tokens=TOKENS,
    depth=DEPTHS,
    width=WIDTHS,
    format=st.sampled_from(sorted(FORMATS)),
    dtype=st.sampled_from(sorted(ALLOWED)),
)
def test_agrees_with_numpy(tokens, depth, width, format, dtype):
    """Any tokens, inputs and outputs agree, in each format."""
    x, _, packed = _draw(tokens, depth, width, format, dtype)
    got = _times(x, packed, format)
    assert got.dtype == x.dtype
    assert_close(got, _wanted(x, packed, format), ALLOWED[dtype])


@pytest.mark.parametrize("tokens", some([70, 2]))
@pytest.mark.parametrize(("bits", "kind", "group"), [(4, np.uint8, 96), (8, np.int16, 16)])
def test_zero_points(bits, kind, group, tokens):
    """Zero points and float32 scales agree, in groups that are no power of two or are small."""
    rng, (width, depth) = np.random.default_rng(bits), (40, 5 * group)
    codes = rng.integers(0, 2**bits, (width, depth)).astype(np.uint8)
    zeros = rng.choice([0, 1, 2 ** (bits - 1), 2**bits], (width, 5))
    scales = rng.uniform(0.5, 2, zeros.shape).astype(np.float32)
    packed = pack(
        jnp.asarray(codes),
        jnp.ones(width),
        jnp.asarray(scales),
        None,
        bits=bits,
        group=group,
        zeros=jnp.asarray(zeros.astype(kind)),
    )
    x = jnp.asarray(rng.standard_normal((tokens, depth)), "bfloat16")
    assert_close(_times(x, packed, "w4a16"), _wanted(x, packed, "w4a16"), ALLOWED["bfloat16"])


@pytest.mark.parametrize("factor", some([1e-30, 1e30]))
@pytest.mark.parametrize("format", some(FORMATS, 0, 2))
def test_extreme_scales(format, factor):
    """Weights of any magnitude are as exact as those around one."""
    x, weight, packed = _draw(3, 100, 20, format)
    scaled = _packed(weight * np.float32(factor), format)
    got = np.asarray(_times(x, scaled, format, out_dtype=jnp.float32)) / factor
    assert_close(got, _wanted(x, packed, format), ALLOWED["bfloat16"])


@pytest.mark.parametrize("format", some(FORMATS, 0, 2))
def test_zeros_and_what_is_not_finite_stay_in_their_place(format):
    """Zeros give zeros; NaN or infinity makes its row, or its column, NaN and nothing else."""
    x, weight, packed = _draw(5, 200, 40, format)
    x = np.array(x, np.float32)
    weight[7], x[1] = 0, 0
    weight[8, :128] = 0
    before = _times(jnp.asarray(x, "bfloat16"), _packed(weight, format), format)
    before = np.asarray(before, np.float32)[:, :40]
    assert not before[:, 7].any() and not before[1].any() and np.isfinite(before).all()
    x[2, 7], x[3, 0] = np.nan, np.inf
    weight[5, 3], weight[30, 199] = np.nan, -np.inf
    packed = _packed(weight, format)
    got = np.asarray(_times(jnp.asarray(x, "bfloat16"), packed, format), np.float32)[:, :40]
    rows, columns = [0, 1, 4], np.setdiff1d(np.arange(40), [5, 30])
    # Infinity may stay where activations are not rounded.
    assert not np.isfinite(got[2]).any() and np.isnan(got[:, [5, 30]]).all()
    np.testing.assert_array_equal(got[np.ix_(rows, columns)], before[np.ix_(rows, columns)])


@pytest.mark.release
def test_rounded_rows_have_the_same_bits_in_any_batch():
    """Sums of integers are exact, so few and many tokens give the same bits."""
    x, _, packed = _draw(90, 1100, 40, "w8a8")
    whole = _times(x, packed, "w8a8")
    for first, count in ((0, 1), (7, 60)):
        some = _times(x[first : first + count], packed, "w8a8")
        np.testing.assert_array_equal(some, whole[first : first + count])


@pytest.mark.release
def test_more_axes_of_columns():
    """A weight with leading axes of columns gives the numbers of its matrix, by axis."""
    weight = jax.random.normal(jax.random.key(0), (2, 2, 20, 70))
    x = jax.random.normal(jax.random.key(1), (5, 70), "bfloat16")
    got = _times(x, _packed(weight, "w4a16"), "w4a16")
    assert got.shape == (5, 2, 2, 32)
    np.testing.assert_array_equal(got[:, 1, 0], _times(x, _packed(weight[1, 0], "w4a16"), "w4a16"))


def test_no_wide_copy_and_few_partial_sums():
    """The program for a GPU has the kernel and no product; splits add at most 8 partial sums."""
    for tokens, sums in ((16, "8x16x1024xf32"), (512, "1x512x1024xbf16")):
        x = jax.ShapeDtypeStruct((tokens, 4096), jnp.dtype("bfloat16"))
        matrix = jax.ShapeDtypeStruct((1024, 4096), jnp.dtype("float32"))
        packed = jax.eval_shape(FORMATS["w4a16"].packed, matrix)
        with targeting():
            traced = jax.jit(quantised_matmul).trace(x, packed)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "stablehlo.dot" not in text and "tensor<1024x4096x" not in text
        assert f"tensor<{sums}>" in text


def test_the_kernel_says_what_it_refuses():
    """Each refusal names its reason, and XLA serves the call on a GPU."""
    x, _, packed = _draw(4, 64, 32, "w8a16")
    _, _, four = _draw(4, 64, 32, "w4a16")

    def refused(match: str, *arguments, **options) -> None:
        with pytest.raises(NotImplementedError, match=match):
            quantised_matmul(*arguments, implementation="triton_interpreted", **options)

    refused("not float32", x.astype(jnp.float32), packed)
    refused("not by group", x, packed, rounds_activations="groups")
    refused("one scale a column", x, four, rounds_activations="tokens")
    refused("is empty", x[:0], packed)
    odd = pack(
        jnp.zeros((16, 80), jnp.uint8), jnp.ones(16), jnp.ones((16, 2)), None, bits=4, group=40
    )
    refused("multiple of 32, not of 40 inputs", jnp.zeros((4, 80), "bfloat16"), odd)
    with pytest.raises(NotImplementedError, match="for NVIDIA GPUs, not for cpu"):
        quantised_matmul(x, packed, implementation="triton")
