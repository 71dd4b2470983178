"""Products with packed weights agree with NumPy's, and a row's bits depend only on the row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.kernels import build, dequantise, quantised_matmul
from jaxserve.kernels.quantised_matmul import cpu, dequantised_rows, pack, quantise, quantise_float8
from jaxserve.sharding import make_mesh
from tests.common.closeness import assert_close
from tests.common.instructions import instruction_sets
from tests.common.tiers import examples, some

# (bits, group, has_minima).
FORMATS = {
    "int8": (8, 64, False),
    "int8 in groups of 32": (8, 32, False),
    "int4": (4, 32, False),
    "int4 in groups of 128": (4, 128, False),
    "int4 with minima": (4, 32, True),
}
# Rows around a tile; depths around a group; widths around a panel and several.
ROWS = st.sampled_from([1, 2, 3, 5, 6, 7, 13, 40])
DEPTHS = st.sampled_from([1, 5, 31, 32, 33, 64, 100, 128, 300])
WIDTHS = st.sampled_from([1, 15, 16, 17, 64, 70, 200])


INSTRUCTIONS = instruction_sets()
if "avx2" in INSTRUCTIONS:
    INSTRUCTIONS["portable"] = ("-march=haswell", "-DPORTABLE")


# Without matrix instructions, where the machine has them.
VECTORS = ("-DNO_SQUARES",)


# Compiled as a whole, since each of its operations alone would be compiled for each shape.
_quantise = jax.jit(quantise, static_argnames=("bits", "group", "has_minima"))
_dequantise = jax.jit(dequantise)
_product = jax.jit(quantised_matmul, static_argnames=("rounds_activations", "implementation"))
_pack = jax.jit(pack, static_argnames=("bits", "group"))


def _draw(rows: int, depth: int, width: int, format: str):
    bits, group, has_minima = FORMATS[format]
    rng = np.random.default_rng(rows * depth + width)
    x = rng.standard_normal((rows, depth), np.float32)
    weight = rng.standard_normal((width, depth), np.float32)
    packed = _quantise(jnp.asarray(weight), bits=bits, group=group, has_minima=has_minima)
    return x, weight, packed


def _rounded(x: np.ndarray, group: int) -> np.ndarray:
    """Return activations as the product rounds them."""
    out = np.zeros(x.shape)
    for first in range(0, x.shape[1], group):
        part = x[:, first : first + group]
        largest = np.abs(part).max(1, keepdims=True)
        inverse = np.float32(127) / np.where(largest == 0, 1, largest)
        out[:, first : first + group] = np.round(part * inverse) * (largest / 127.0)
    return out


def _by_kernel(x, packed, instructions: str = "native") -> np.ndarray:
    target = build.cpu_target(cpu.SOURCE, cpu.SYMBOL, INSTRUCTIONS[instructions])
    return np.asarray(cpu.call(target, jnp.asarray(x), packed))


@pytest.mark.parametrize("format", FORMATS)
def test_matrix_instructions_change_no_bit(format):
    """Rows in whole squares, and those after them, have the bits of the vector instructions."""
    # 200 columns are several panels, the last of them a part; 300 rows end within a group.
    x, _, packed = _draw(69, 300, 200, format)
    x[3, 40], x[5] = np.nan, 0.0
    vectors = build.cpu_target(cpu.SOURCE, cpu.SYMBOL, VECTORS)
    got = _by_kernel(x, packed, "native")
    wanted = np.asarray(cpu.call(vectors, jnp.asarray(x), packed))
    np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))
    assert np.isnan(got[3]).all() and not got[5].any()


@examples(3, 100)
@given(
    rows=ROWS,
    depth=DEPTHS,
    width=WIDTHS,
    format=st.sampled_from(sorted(FORMATS)),
    implementation=st.sampled_from([*INSTRUCTIONS, "xla"]),
)
def test_agrees_with_numpy(rows, depth, width, format, implementation):
    """Any rows, depth and width agree, in each format, on each instruction set and in XLA."""
    x, _, packed = _draw(rows, depth, width, format)
    restored = np.asarray(_dequantise(packed), np.float64)[:width, :depth]
    if implementation == "xla":
        got = _product(jnp.asarray(x), packed, rounds_activations="groups", implementation="xla")
    else:
        got = _by_kernel(x, packed, implementation)
    # One activation between two codes may be rounded either way.
    assert_close(got[:, :width], _rounded(x, packed.group) @ restored.T, 1e-3)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("format", FORMATS)
def test_whole_numbers_are_exact(format, instructions):
    """Products of codes up to the largest do not overflow: all activations are 127 or -127."""
    bits, group, has_minima = FORMATS[format]
    depth, rng = 2 * group, np.random.default_rng(0)
    codes = rng.choice([0, 1, 2**bits - 2, 2**bits - 1], (32, depth)).astype(np.uint8)
    codes[0], codes[1] = 0, 2**bits - 1
    scales = np.ones((32, 2), np.float16)
    packed = _pack(
        jnp.asarray(codes),
        jnp.ones(32),
        jnp.asarray(scales) if bits == 4 else None,
        jnp.asarray(-3 * scales) if has_minima else None,
        bits=bits,
        group=group,
    )
    x = np.where(rng.random((5, depth)) < 0.5, -127, 127).astype(np.float32)
    x[0] = 127
    weight = codes.astype(np.int64) - packed.offset - (3 if has_minima else 0)
    np.testing.assert_array_equal(_by_kernel(x, packed, instructions), x @ weight.T)


@pytest.mark.parametrize("factor", [1e-30, 1.0, 1e30])
def test_float8(factor):
    """Columns keep their largest number to float8's precision, zeros are exact, NaN stays."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((40, 70), np.float32) * np.float32(factor)
    weight[3], weight[5, 7] = 0, np.nan
    packed = jax.jit(quantise_float8, static_argnames="group")(jnp.asarray(weight), group=32)
    got = np.asarray(_dequantise(packed))[:40, :70]
    assert not got[3].any() and np.isnan(got[5]).all()
    rest = np.setdiff1d(np.arange(40), [5])
    assert_close(got[rest] / factor, weight[rest] / factor, 0.03)
    np.testing.assert_allclose(np.abs(got[rest]).max(1), np.abs(weight[rest]).max(1), rtol=1e-5)
    x = rng.standard_normal((6, 70), np.float32)
    product = _product(jnp.asarray(x), packed, rounds_activations=None)[:, rest]
    assert_close(product / factor, x @ (got[rest] / factor).T)
    with pytest.raises(NotImplementedError, match="multiplies integers"):
        quantised_matmul(jnp.asarray(x), packed, rounds_activations="groups", implementation="cpu")


@pytest.mark.parametrize("implementation", [*INSTRUCTIONS, "xla"])
@pytest.mark.parametrize("scales_dtype", some(["float16", None, "float32"]))
@pytest.mark.parametrize(("bits", "kind"), [(4, np.uint8), (8, np.int16)])
def test_zero_points(bits, kind, scales_dtype, implementation):
    """Zero points from 0 to one past the largest code agree, with and without scales."""
    rng, (width, depth), group = np.random.default_rng(bits), (40, 96), 32
    codes = rng.integers(0, 2**bits, (width, depth)).astype(np.uint8)
    zeros = rng.choice([0, 1, 2 ** (bits - 1), 2**bits - 1, 2**bits], (width, depth // group))
    scales = None
    if scales_dtype is not None:
        scales = rng.uniform(0.5, 2, zeros.shape).astype(scales_dtype)
    channels = rng.uniform(0.5, 2, width).astype(np.float32)
    packed = _pack(
        jnp.asarray(codes),
        jnp.asarray(channels),
        None if scales is None else jnp.asarray(scales),
        None,
        bits=bits,
        group=group,
        zeros=jnp.asarray(zeros.astype(kind)),
    )
    numbers = codes.astype(np.float64) - np.repeat(zeros, group, axis=1)
    if scales is not None:
        numbers *= np.repeat(scales.astype(np.float64), group, axis=1)
    numbers *= channels[:, None]
    np.testing.assert_allclose(_dequantise(packed)[:width], numbers, rtol=1e-6)
    np.testing.assert_array_equal(
        jax.jit(dequantised_rows)(packed, jnp.asarray([39, 0, 17])),
        np.asarray(_dequantise(packed))[[39, 0, 17]],
    )
    x = rng.standard_normal((7, depth), np.float32)
    if implementation == "xla":
        got = _product(jnp.asarray(x), packed, rounds_activations="groups", implementation="xla")
    else:
        got = _by_kernel(x, packed, implementation)
    assert_close(got[:, :width], _rounded(x, group) @ numbers.T, 1e-3)


@pytest.mark.parametrize("instructions", some(INSTRUCTIONS))
@pytest.mark.parametrize("format", FORMATS)
def test_the_bits_of_a_row_are_its_own(format, instructions):
    """A row has the same bits alone, in any batch, and at any place of it."""
    x, _, packed = _draw(41, 300, 130, format)
    whole = _by_kernel(x, packed, instructions)
    for first, count in ((0, 1), (3, 2), (5, 5), (17, 13), (8, 33)):
        some = _by_kernel(x[first : first + count], packed, instructions)
        np.testing.assert_array_equal(some, whole[first : first + count])


@pytest.mark.parametrize("format", FORMATS)
def test_the_error_is_that_of_the_format(format):
    """The product is about the dense one: within 2 % with 8 bits, 16 % with 4."""
    x, weight, packed = _draw(40, 300, 200, format)
    got = _product(jnp.asarray(x), packed, rounds_activations="groups")[:, :200]
    assert_close(got, x @ weight.T, 0.02 if FORMATS[format][0] == 8 else 0.16)


@pytest.mark.parametrize("factor", some([1e-30, 1e-12, 1e12, 1e30]))
@pytest.mark.parametrize("format", FORMATS)
def test_extreme_scales(format, factor):
    """Weights of any magnitude are as exact as those around one."""
    x, weight, _ = _draw(3, 100, 20, format)
    bits, group, has_minima = FORMATS[format]
    packed = _quantise(jnp.asarray(weight * factor), bits=bits, group=group, has_minima=has_minima)
    got = _by_kernel(x, packed)[:, :20] / factor
    assert_close(got, x @ weight.T, 0.02 if bits == 8 else 0.16)
    if factor > 1e-30:  # the product itself would underflow
        small = _by_kernel(x * np.float32(1e-20), packed)[:, :20] / factor * 1e20
        assert_close(small, got, 1e-3)


@pytest.mark.parametrize("format", FORMATS)
def test_groups_of_zeros_are_exact(format):
    """Zeros in weights or activations give zeros, and change nothing elsewhere."""
    x, weight, _ = _draw(4, 256, 40, format)
    bits, group, has_minima = FORMATS[format]
    weight[:, :128] = 0
    weight[7] = 0
    x[1, 128:] = 0
    x[2] = 0
    packed = _quantise(jnp.asarray(weight), bits=bits, group=group, has_minima=has_minima)
    got = _by_kernel(x, packed)
    assert not got[:, 7].any() and not got[1:3].any() and np.isfinite(got).all()
    x[:, :128] = 0
    np.testing.assert_array_equal(_by_kernel(x, packed), got)


@pytest.mark.parametrize("implementation", some(["cpu", "xla"]))
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_stays_in_its_row_and_column(format, implementation):
    """NaN or infinity in an activation makes its row NaN, in a weight its column."""
    x, weight, packed = _draw(20, 100, 40, format)
    bits, group, has_minima = FORMATS[format]

    def times(x, packed):
        x = jnp.asarray(x)
        return np.asarray(
            _product(x, packed, rounds_activations="groups", implementation=implementation)
        )

    before = times(x, packed)[:, :40]
    x[4, 7], x[9, 0] = np.nan, np.inf
    weight[5, 3], weight[30, 99] = np.nan, -np.inf
    broken = _quantise(jnp.asarray(weight), bits=bits, group=group, has_minima=has_minima)
    got = times(x, broken)[:, :40]
    assert np.isnan(got[[4, 9]]).all() and np.isnan(got[:, [5, 30]]).all()
    rows = np.setdiff1d(np.arange(20), [4, 9])
    columns = np.setdiff1d(np.arange(40), [5, 30])
    np.testing.assert_allclose(
        got[np.ix_(rows, columns)], before[np.ix_(rows, columns)], rtol=1e-5, atol=1e-5
    )


def test_more_axes_of_columns():
    """A weight with leading axes of columns gives the numbers of its matrix, by axis."""
    weight = jax.random.normal(jax.random.key(0), (2, 3, 20, 70))
    x = jax.random.normal(jax.random.key(1), (5, 70))
    packed = _quantise(weight, bits=4, group=32)
    got = _product(x, packed, rounds_activations="groups")
    assert got.shape == (5, 2, 3, 32)
    for i in range(2):
        for j in range(3):
            one = _quantise(weight[i, j], bits=4, group=32)
            alone = _product(x, one, rounds_activations="groups")
            np.testing.assert_array_equal(got[:, i, j], alone)


@pytest.mark.parametrize("format", some(FORMATS))
def test_rows_of_an_embedding(format):
    """Columns of the packed matrix are those of the dequantised one."""
    _, _, packed = _draw(1, 100, 40, format)
    index = jnp.asarray([39, 0, 16, 16])
    np.testing.assert_array_equal(dequantised_rows(packed, index), dequantise(packed)[index])


def test_the_kernel_says_what_it_refuses():
    """Whole activations and meshes are served by XLA, and the reason is logged."""
    x, _, packed = _draw(4, 64, 32, "int8")
    x = jnp.asarray(x)
    with pytest.raises(NotImplementedError, match="rounds activations"):
        quantised_matmul(x, packed, rounds_activations=None, implementation="cpu")
    got = _product(x, packed, rounds_activations=None)
    assert_close(got, x @ np.asarray(_dequantise(packed)).T, 1e-6)
    product = jax.jit(lambda x, packed: quantised_matmul(x, packed, rounds_activations="groups"))
    with jax.set_mesh(make_mesh(tensor=2)):
        assert "custom-call" not in product.lower(x, packed).compile().as_text()
    assert "custom-call" in product.lower(x, packed).compile().as_text()


@pytest.mark.usefixtures("unchecked_shapes")
def test_shapes_that_contradict_each_other_are_refused():
    """The errors name what was given."""
    x, _, packed = _draw(4, 64, 32, "int8")
    with pytest.raises(ValueError, match=r"x\(4, 65\) and a weight of 64 rows"):
        quantised_matmul(jnp.zeros((4, 65)), packed, rounds_activations="groups")
    with pytest.raises(ValueError, match="bits=5, group=32"):
        pack(jnp.zeros((4, 32), jnp.uint8), jnp.ones(4), None, None, bits=5, group=32)
