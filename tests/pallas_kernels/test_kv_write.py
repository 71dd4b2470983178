"""Rotating queries and keys, and writing keys and values into pages, agree with the reference."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import kv_write, quantize, rotate_and_write
from jaxserve.kernels.kv_write import reference
from jaxserve.kernels.kv_write.shapes import TEST_SHAPES, WriteShape, make_inputs
from tests.common.tiers import some

# Compiled as a whole, once for all calls of the same shapes.
_rotate_and_write = jax.jit(rotate_and_write, static_argnames=("layer", "implementation"))

# Largest difference relative to the reference: one rounding of the stored numbers.
ALLOWED = {"float32": 1e-6, "bfloat16": 2**-7, "int8": 0.02, "float8_e4m3fn": 2**-3}


def _inputs(seed: int, dtype: str):
    """Return a ragged step: rows at random positions of scattered pages; padding on page 0."""
    random = np.random.default_rng(seed)
    layers, heads, head_dim = random.integers(1, 5, 3)
    page_size = int(random.choice([1, 4, 8]))
    starts, lengths = random.integers(0, 40, 5), random.integers(0, 20, 5)
    width = -(-60 // page_size)
    tables = 1 + random.permutation(5 * width).reshape(5, width)
    page, offset = [], []
    for table, start, length in zip(tables, starts, lengths, strict=True):
        position = start + np.arange(length)
        page.append(table[position // page_size])
        offset.append(position % page_size)
    padding = int(random.integers(0, 9))
    page.append(np.zeros(padding))
    offset.append(random.integers(0, page_size, padding))
    page, offset = (jnp.asarray(np.concatenate(x), jnp.int32) for x in (page, offset))
    pages = random.standard_normal((layers, 1 + tables.size, heads, page_size, head_dim))
    values = random.standard_normal((page.size, heads, head_dim))
    layer = int(random.integers(layers))
    return jnp.asarray(pages, dtype), layer, jnp.asarray(values, jnp.float32), page, offset


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("seed", some(range(6)))
def test_random_ragged_steps(seed, dtype):
    """Every page except the null page has the reference's bits, with a static or traced layer."""
    pages, layer, *step = _inputs(seed, dtype)
    wanted = np.asarray(reference.kv_write(pages, layer, *step))
    assert not np.array_equal(wanted[:, 1:], pages[:, 1:])
    for got in (
        kv_write(pages, layer, *step),
        jax.jit(kv_write, static_argnums=1)(pages, layer, *step),
        jax.jit(kv_write)(pages, jnp.int32(layer), *step),
    ):
        assert got.dtype == pages.dtype
        np.testing.assert_array_equal(got[:, 1:], wanted[:, 1:])


def test_padding_reaches_only_its_place_on_the_null_page():
    """One of several tokens at one place of page 0 is written whole; nothing else changes."""
    pages = jnp.zeros((2, 3, 2, 4, 8))
    values = jnp.broadcast_to(jnp.arange(1.0, 4.0)[:, None, None], (3, 2, 8))
    where = jnp.zeros(3, jnp.int32)
    got = np.array(jax.jit(kv_write)(pages, jnp.int32(1), values, where, where + 2))
    assert np.isin(got[1, 0, :, 2], (1, 2, 3)).all()
    got[1, 0, :, 2] = 0
    assert not got.any()


IN_FLOAT32 = [replace(shape, dtype="float32") for shape in TEST_SHAPES]
CASES = [
    *((name, shape) for name in ("xla", "triton_interpreted") for shape in TEST_SHAPES),
    *(("cpu", shape) for shape in IN_FLOAT32),
]


@pytest.mark.parametrize(
    ("implementation", "shape"),
    some(CASES, 0, len(TEST_SHAPES), 2 * len(TEST_SHAPES)),
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("seed", some(range(2)))
def test_rotated_and_written(implementation, shape, seed):
    """Queries are returned, keys and values are in their places, and nothing else changes.

    The layer is static or traced.
    """
    inputs = make_inputs(shape, seed, padding=shape.tokens // 4)
    layer = seed % 2
    write = partial(rotate_and_write, implementation=implementation)
    wanted = rotate_and_write(**inputs, layer=layer, implementation="reference")
    got = (
        jax.jit(write)(**inputs, layer=jnp.int32(1))
        if layer
        else _rotate_and_write(**inputs, layer=0, implementation=implementation)
    )
    _check_written(shape, inputs, got, wanted)


def _check_written(shape: WriteShape, inputs, got, wanted) -> None:
    names = ("k_pages", "v_pages", "k_scales", "v_scales")
    _check_close(got[0], wanted[0], shape.dtype)
    for name, new, right in zip(names, got[1:], wanted[1:], strict=True):
        if right is None:
            assert new is None
            continue
        assert new.dtype == right.dtype == inputs[name].dtype
        # Page 0 gets the padding.
        old, new, right = (np.asarray(x)[:, 1:] for x in (inputs[name], new, right))
        is_same = _bits(right) == _bits(old)
        assert not is_same.all()
        np.testing.assert_array_equal(_bits(new)[is_same], _bits(old)[is_same])
        _check_close(new, right, shape.page_dtype if "pages" in name else shape.dtype)


def _check_close(got, wanted, dtype: str) -> None:
    got, wanted = (np.asarray(x, np.float32) for x in (got, wanted))
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(got, wanted, rtol=ALLOWED[dtype], atol=ALLOWED[dtype] * scale / 8)


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


@pytest.mark.parametrize("implementation", ["cpu", "triton_interpreted"])
def test_values_that_are_no_numbers_stay_in_their_head(implementation):
    """A head of infinities and a head of NaN leave all other heads unchanged."""
    shape = TEST_SHAPES[0]
    inputs = make_inputs(shape, seed=0)
    write = partial(_rotate_and_write, layer=0, implementation=implementation)
    wanted = write(**inputs)
    broken = inputs["qkv"].at[3, 1, -1].set(jnp.inf).at[5, 0, 0].set(jnp.nan)
    got = write(**{**inputs, "qkv": broken})
    page, offset = int(inputs["page"][3]), int(inputs["offset"][3])
    np.testing.assert_array_equal(got[2][0, page, 1, offset], jnp.inf)
    assert np.isnan(got[0][5, 0]).all()
    mended = [np.array(x) for x in got[:3]]
    mended[2][0, page, 1, offset] = wanted[2][0, page, 1, offset]
    mended[0][5, 0] = wanted[0][5, 0]
    for one, other in zip(mended, wanted[:3], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_the_kernel_for_cpus_rounds_as_xla_does(dtype):
    """Ties, zeros, tiny numbers, NaN and infinities get the same codes and scales."""
    shape = replace(TEST_SHAPES[-1], dtype="float32", page_dtype=dtype, tokens=64)
    inputs = make_inputs(shape, seed=0)
    largest = {"bfloat16": 1000, "int8": 127, "float8_e4m3fn": 448}[dtype]
    rng = np.random.default_rng(0)
    # Whole and half steps of a scale of one, and of bfloat16 from 128 on, in heads whose largest
    # number has no rest.
    values = rng.integers(-2 * largest, 2 * largest, inputs["qkv"].shape) / 2
    values[..., 0] = largest
    values[1], values[2, 0], values[3, 1, -1, 3] = 0, 1e-30, np.nan
    values[4, 0, -1, 2], values[5, 1, -2, 5] = np.inf, -np.inf
    inputs |= {"qkv": jnp.asarray(values, jnp.float32), "tables": None}
    got, wanted = (_rotate_and_write(**inputs, layer=0, implementation=i) for i in ("cpu", "xla"))
    for new, right in zip(got, wanted, strict=True):
        if right is None:
            continue
        new, right = np.asarray(new), np.asarray(right)
        if new.ndim == 5:
            # NaN has two codes in float8; its scale is NaN in any case.
            new, right = new[:, 1:].astype(np.float32), right[:, 1:].astype(np.float32)
            np.testing.assert_array_equal(new, right)
        elif new.ndim == 4:
            np.testing.assert_array_equal(new[:, 1:], right[:, 1:])


def test_a_donated_cache_is_written_in_place():
    """The memory is the same, without temporaries of the cache's size, with a traced layer."""
    shape = TEST_SHAPES[0]
    inputs = make_inputs(shape, seed=0)
    size = (3, 500, shape.kv_heads, shape.page_size, shape.head_dim)
    inputs["k_pages"], inputs["v_pages"] = jnp.zeros(size), jnp.ones(size)
    step = jax.jit(rotate_and_write, donate_argnames=("k_pages", "v_pages"))
    compiled = step.lower(**inputs, layer=jnp.int32(1)).compile()
    sizes, num_bytes = compiled.memory_analysis(), inputs["k_pages"].nbytes
    assert sizes is not None and sizes.alias_size_in_bytes == 2 * num_bytes
    assert sizes.temp_size_in_bytes < num_bytes / 10
    before = [inputs[name].unsafe_buffer_pointer() for name in ("k_pages", "v_pages")]
    written = compiled(**inputs, layer=jnp.int32(1))
    assert [x.unsafe_buffer_pointer() for x in written[1:3]] == before


@pytest.mark.usefixtures("unchecked_shapes")
def test_contradictory_shapes_are_refused():
    inputs = make_inputs(TEST_SHAPES[0], seed=0)
    write = partial(rotate_and_write, layer=0)
    with pytest.raises(ValueError, match="group \\+ 2"):
        write(**{**inputs, "qkv": inputs["qkv"][:, :1]})
    with pytest.raises(ValueError, match=r"one per token, \[13\]"):
        write(**{**inputs, "page": inputs["page"][1:]})
    with pytest.raises(ValueError, match="rotated at most head_dim"):
        write(
            **{
                **inputs,
                "qkv": inputs["qkv"][..., :8],
                "k_pages": inputs["k_pages"][..., :8],
                "v_pages": inputs["v_pages"][..., :8],
            }
        )
    with pytest.raises(ValueError, match="both or none"):
        write(**{**inputs, "k_scales": inputs["k_pages"][..., 0]})
    with pytest.raises(ValueError, match="unknown"):
        write(**inputs, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="not for cpu"):
        write(**inputs, implementation="triton")


@pytest.mark.parametrize(
    ("dtype", "share", "of_scale"), [("int8", 0.0, 0.5), ("float8_e4m3fn", 2**-4, 2**-10)]
)
def test_quantized_values_are_restored_within_half_a_step(dtype, share, of_scale):
    """A step is one scale, or, with a mantissa of three bits, an eighth of the power of two."""
    values = jnp.asarray(np.random.default_rng(0).standard_cauchy((50, 3, 16)), jnp.float32)
    values = values.at[7].set(0.0)
    quantized, scales = jax.jit(quantize, static_argnums=1)(values, dtype)
    assert quantized.dtype == dtype and scales.shape == (50, 3) and scales.dtype == jnp.float32
    restored = quantized.astype(jnp.float32) * scales[..., None]
    most = jnp.maximum(share * jnp.abs(values), of_scale * scales[..., None])
    assert (jnp.abs(restored - values) <= 1.00001 * most).all()
    largest = jnp.abs(values).max(-1)
    np.testing.assert_allclose(jnp.abs(restored).max(-1), largest, rtol=1e-6)


@pytest.mark.parametrize("wrong", some([jnp.nan, jnp.inf, -jnp.inf]))
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_what_is_not_a_number_stays_none(dtype, wrong):
    """NaN is in the scale, and so in the whole vector; neighbouring vectors are unchanged."""
    values = jnp.ones((2, 8)).at[1, 3].set(wrong)
    quantized, scales = quantize(values, dtype)
    restored = quantized.astype(jnp.float32) * scales[..., None]
    np.testing.assert_allclose(restored[0], 1.0, rtol=1e-6)
    assert not np.isfinite(np.asarray(scales[1]))


def test_other_dtypes_have_no_scales():
    """The error lists the dtypes with scales."""
    with pytest.raises(ValueError, match="'bfloat16' .* one of .*'int8'"):
        quantize(jnp.ones((2, 8)), jnp.bfloat16)
