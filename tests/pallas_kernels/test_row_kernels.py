"""Products, norms and sums of a row have the same bits in any batch, and are right."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import (
    RMSScale,
    Rows,
    fused_matmul,
    layer_norm,
    log_sum_exp,
    matmul,
    paged_attention,
    rms_norm,
)
from jaxserve.kernels.fused_matmul.row_shapes import TEST_CONFIGURATIONS, make_inputs
from jaxserve.kernels.paged_attention import Plan, planned_tiling
from jaxserve.kernels.paged_attention.shapes import AttentionShape
from jaxserve.kernels.paged_attention.shapes import make_inputs as make_attention_inputs
from tests.common.closeness import assert_close
from tests.common.tiers import some

# Relative norm of the error against float64: the sums are in float32, and rounded once.
ALLOWED = {"float32": 1e-6, "float16": 5e-4, "bfloat16": 4e-3}


def _in_float64(configuration: Any, inputs: dict[str, Any]) -> np.ndarray:
    """Return gate(x @ weight + bias) + residual."""
    arrays = {name: np.asarray(each, np.float64) for name, each in inputs.items()}
    weight = arrays["weight"]
    if configuration.is_transposed:
        weight = weight.T
    out = np.tensordot(arrays["x"], weight, 1) + arrays.get("bias", 0.0)
    if configuration.is_gated:
        out = out[:, 0] / (1 + np.exp(-out[:, 0])) * out[:, 1]
    return out + arrays.get("residual", 0.0)


@pytest.mark.parametrize("configuration", some(TEST_CONFIGURATIONS), ids=str)
def test_products_agree_with_float64_and_rows_keep_their_bits(configuration):
    """Sizes fill no tile; a row has the same bits beside other rows, in fewer or in more tiles."""
    function, _ = configuration.call(interpret=True)
    inputs = jax.jit(partial(make_inputs, configuration, seed=1))()
    run = jax.jit(function)
    got = np.asarray(run(**inputs))
    wanted = _in_float64(configuration, inputs)
    allowed = ALLOWED["float32" if configuration.is_head else configuration.dtype]
    assert_close(got, wanted, allowed)

    random = np.random.default_rng(configuration.tokens)
    of_rows = {"x", "residual"} & set(inputs)
    for num_others in (0, 1, 63, 130):
        chosen = int(random.integers(len(got)))
        place = int(random.integers(num_others + 1))
        many = dict(inputs)
        for name in of_rows:
            array = np.asarray(inputs[name])
            rows = random.normal(size=(num_others + 1, array.shape[1])).astype(array.dtype)
            rows[place] = array[chosen]
            many[name] = jnp.asarray(rows)
        np.testing.assert_array_equal(np.asarray(run(**many))[place], got[chosen])


def test_a_norm_before_the_product_is_its_own_kernel():
    """The result is that of the norm, rounded, and then of the product."""
    random = np.random.default_rng(2)
    x = jnp.asarray(random.normal(size=(3, 64)), jnp.bfloat16)
    weight = jnp.asarray(random.normal(size=(64, 40)), jnp.bfloat16)
    scale = jnp.asarray(random.normal(size=64), jnp.bfloat16)
    product = partial(fused_matmul, weight=weight, implementation="triton_rows_interpreted")
    got = product(x, norm=RMSScale(scale, 1e-5, offset=1.0))
    kernel = partial(rms_norm, implementation="triton_interpreted")
    normed = kernel(x, scale, eps=1e-5, offset=1.0)
    np.testing.assert_array_equal(got, product(normed))
    right = rms_norm(x.astype(jnp.float32), scale, eps=1e-5, offset=1.0, implementation="xla")
    np.testing.assert_allclose(normed.astype(jnp.float32), right, rtol=1e-2)


@pytest.mark.parametrize("width", some([100, 8, 1500]))
def test_norms_agree_with_numpy_in_any_batch(width):
    """Both norms do, of one row and of many, in three dtypes."""
    random = np.random.default_rng(width)
    scale, bias = random.normal(size=(2, width))
    for dtype in ("bfloat16", "float16", "float32"):
        x, gamma, beta = (
            jnp.asarray(each, dtype)
            for each in (random.normal(2.0, 3.0, size=(2, 4, width)), scale, bias)
        )
        kernels = {
            "rms": partial(rms_norm, scale=gamma, eps=1e-5, offset=1.0),
            "layer": partial(layer_norm, scale=gamma, bias=beta, eps=1e-5),
        }
        wide, g, b = (np.asarray(each, np.float64) for each in (x, gamma, beta))
        centred = wide - wide.mean(-1, keepdims=True)
        wanted = {
            "rms": wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * (g + 1.0),
            "layer": centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * g + b,
        }
        for name, kernel in kernels.items():
            run = jax.jit(partial(kernel, implementation="triton_interpreted"))
            got = run(x)
            assert_close(got, wanted[name], ALLOWED[dtype])
            alone = run(np.asarray(x)[1, 2:3])[0]
            np.testing.assert_array_equal(alone, np.asarray(got)[1, 2])


def test_log_sum_exp_agrees_with_xla_and_is_differentiable():
    """Rows wider than a block, with infinities and NaNs; the gradient is the softmax."""
    x = 3 * np.random.default_rng(0).normal(size=(5, 9000)).astype(np.float32)
    x[1], x[2, 5], x[3, 7], x[4, 9:] = -np.inf, np.inf, np.nan, -np.inf
    x = jnp.asarray(x)
    ours, right = (
        jax.jit(partial(log_sum_exp, implementation=name)) for name in ("triton_interpreted", "xla")
    )
    np.testing.assert_allclose(ours(x), right(x), rtol=1e-6)
    np.testing.assert_array_equal(ours(x[4:]), ours(x)[4:])
    gradient = jax.grad(lambda x: ours(x)[0])(x[:1])
    np.testing.assert_allclose(gradient, jax.nn.softmax(x[:1]), rtol=1e-5, atol=1e-9)


@pytest.mark.release
def test_a_query_has_the_same_bits_in_any_chunk_and_decoded_alone():
    """All rows go to the split kernel, several programs share a row or none, and one merges."""
    heads = dict(kv_heads=2, group=4, head_dim=16)
    tiling = planned_tiling(
        jax.devices()[0],
        "triton_interpreted",
        **dict(dtype="float32", page_dtype="float32"),
        chunk_invariant=True,
        **heads,
    )
    assert tiling is not None
    tiling = replace(tiling, split_programs=8)
    shape = AttentionShape(
        name="chunks",
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
        page_size=16,
        rows=((33, 600), (70, 1100)),
    )
    q, k_pages, v_pages, rows = make_attention_inputs(shape, seed=0)
    options: dict[str, Any] = dict(layer=0, sliding_window=700, soft_cap=5.0)
    kernel = partial(paged_attention, implementation="triton_interpreted", **options)
    chunk, decode = jax.jit(kernel), jax.jit(partial(kernel, max_query_length=1))

    def made(rows: Rows, num_tokens: int, is_decode: bool) -> Plan:
        found = rows.plan(tiling, num_tokens=num_tokens, max_context=1200, is_decode=is_decode)
        assert len(found.tiles) == 0
        return found

    whole = np.asarray(chunk(q, k_pages, v_pages, rows=rows, plan=made(rows, len(q), False)))
    xla = jax.jit(partial(paged_attention, implementation="xla", **options))
    right = xla(q, k_pages, v_pages, rows=rows)
    np.testing.assert_allclose(whole, right, rtol=1e-5, atol=1e-6)
    num_merges = []
    for row, begin, count in ((0, 12, 21), (1, 0, 21), (0, 32, 1), (1, 69, 1), (1, 3, 1)):
        start = int(rows.query_start[row]) + begin
        first = jnp.asarray([int(rows.first_position[row]) + begin], jnp.int32)
        length = jnp.asarray([count], jnp.int32)
        one = Rows(first * 0, length, first, first + length, rows.page_table[row : row + 1])
        own, work = q[start : start + count], made(one, count, count == 1)
        num_merges.append(int(work.counts[2]))
        got = (decode if count == 1 else chunk)(own, k_pages, v_pages, rows=one, plan=work)
        np.testing.assert_array_equal(np.asarray(got), whole[start : start + count])
    assert set(num_merges) > {0}


def test_what_is_refused():
    """A kernel that is asked for by name says what it does not serve."""
    x, weight = jnp.ones((2, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)
    product = partial(matmul, implementation="triton_interpreted")
    for name in ("triton", "triton_rows"):
        function = matmul if name == "triton" else fused_matmul
        with pytest.raises(NotImplementedError, match="not for cpu"):
            function(x, weight, implementation=name)
    with pytest.raises(NotImplementedError, match="not bfloat16 and float32"):
        product(x, weight.astype(jnp.float32))
    with pytest.raises(NotImplementedError, match="is empty"):
        product(x[:0], weight)
    with pytest.raises(NotImplementedError, match="up to 32768 numbers, not 32769"):
        wide = jnp.ones((1, 32769))
        rms_norm(wide, wide[0], eps=1e-5, implementation="triton_interpreted")
