"""Operations on rows agree with NumPy's, and a row's bits depend only on the row."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.kernels import build, gated_silu, layer_norm, log_sum_exp, rms_norm, row_maximum
from jaxserve.kernels.pointwise import cpu
from jaxserve.sharding import make_mesh
from tests.common.closeness import assert_close
from tests.common.instructions import instruction_sets
from tests.common.tiers import examples, some

# Compiled as a whole, since each of their operations alone would be compiled for each shape.
_xla_rms_norm = jax.jit(partial(rms_norm, implementation="xla"), static_argnames=("eps", "offset"))
_xla_layer_norm = jax.jit(partial(layer_norm, implementation="xla"), static_argnames="eps")
_xla_log_sum_exp = jax.jit(partial(log_sum_exp, implementation="xla"))
_xla_gated_silu = jax.jit(partial(gated_silu, implementation="xla"))

INSTRUCTIONS = instruction_sets()
ROWS = st.sampled_from([1, 2, 7, 33, 200])
WIDTHS = st.sampled_from([1, 8, 15, 16, 17, 64, 100, 576, 1537])


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def _norm(x, scale, instructions: str, eps: float = 1e-5, offset: float = 0.0) -> np.ndarray:
    target = build.cpu_target(cpu.SOURCE, "RmsNorm", INSTRUCTIONS[instructions])
    return np.asarray(cpu.norm_by(target, eps, offset, jnp.asarray(x), jnp.asarray(scale)))


def _layer_norm(x, scale, bias, instructions: str, eps: float = 1e-5) -> np.ndarray:
    target = build.cpu_target(cpu.SOURCE, "LayerNorm", INSTRUCTIONS[instructions])
    return np.asarray(cpu.layer_norm_by(target, eps, *map(jnp.asarray, (x, scale, bias))))


def _log_sum_exp(x, instructions: str) -> np.ndarray:
    target = build.cpu_target(cpu.SOURCE, "LogSumExp", INSTRUCTIONS[instructions])
    return np.asarray(cpu.log_sum_exp_by(target, jnp.asarray(x)))


def _gate(x, instructions: str) -> np.ndarray:
    target = build.cpu_target(cpu.SOURCE, "GatedSilu", INSTRUCTIONS[instructions])
    return np.asarray(cpu.gate_by(target, jnp.asarray(x)))


@examples(3, 100)
@given(
    rows=ROWS,
    width=WIDTHS,
    offset=st.sampled_from([0.0, 1.0]),
    instructions=st.sampled_from([*INSTRUCTIONS, "xla"]),
)
def test_norms_agree_with_float64(rows, width, offset, instructions):
    """Any number and width of rows agree, with and without an offset of the scale."""
    x, scale = _normal(rows, width), _normal(width)
    if instructions == "xla":
        got = _xla_rms_norm(x, scale, eps=1e-5, offset=offset)
    else:
        got = _norm(x, scale, instructions, offset=offset)
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * (scale + offset)
    assert_close(got, wanted, 1e-6)


@examples(3, 100)
@given(rows=ROWS, width=WIDTHS, instructions=st.sampled_from([*INSTRUCTIONS, "xla"]))
def test_layer_norms_agree_with_float64(rows, width, instructions):
    """Any number and width of rows agree, and so do rows far from zero."""
    x, scale, bias = 3 + _normal(rows, width), _normal(width), _normal(width + 1)[1:]
    if instructions == "xla":
        got = _xla_layer_norm(x, scale, bias, eps=1e-2)
    else:
        got = _layer_norm(x, scale, bias, instructions, eps=1e-2)
    wide = x.astype(np.float64) - x.astype(np.float64).mean(1, keepdims=True)
    wanted = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-2) * scale + bias
    assert_close(got, wanted)


@examples(3, 100)
@given(rows=ROWS, width=WIDTHS, instructions=st.sampled_from([*INSTRUCTIONS, "xla"]))
def test_log_sum_exp_agrees_with_float64(rows, width, instructions):
    """Any number and width of rows agree, however large their numbers are."""
    x = 20 * _normal(rows, width) + 300
    got = _xla_log_sum_exp(x) if instructions == "xla" else _log_sum_exp(x, instructions)
    wide = x.astype(np.float64)
    top = wide.max(1)
    wanted = top + np.log(np.exp(wide - top[:, None]).sum(1))
    assert_close(got, wanted, 1e-6)


@examples(3, 100)
@given(rows=ROWS, width=WIDTHS, instructions=st.sampled_from([*INSTRUCTIONS, "xla"]))
def test_gates_agree_with_float64(rows, width, instructions):
    """Any number and width of rows agree."""
    x = 10 * _normal(rows, 2, width)
    if instructions == "xla":
        got = _xla_gated_silu(x)
    else:
        got = _gate(x, instructions)
    gate, up = x[:, 0].astype(np.float64), x[:, 1].astype(np.float64)
    assert_close(got, gate / (1 + np.exp(-gate)) * up, 1e-6)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_the_bits_of_a_row_are_its_own(instructions):
    """A row has the same bits alone, in any batch, and at any place of it."""
    x, scale, both = _normal(70, 100), _normal(100), _normal(70, 2, 100)
    norms, gates = _norm(x, scale, instructions), _gate(both, instructions)
    layers = _layer_norm(x, scale, -scale, instructions)
    sums = _log_sum_exp(x, instructions)
    for first, count in ((0, 1), (3, 8), (20, 50)):
        part = slice(first, first + count)
        np.testing.assert_array_equal(_norm(x[part], scale, instructions), norms[part])
        np.testing.assert_array_equal(_gate(both[part], instructions), gates[part])
        found = _layer_norm(x[part], scale, -scale, instructions)
        np.testing.assert_array_equal(found, layers[part])
        np.testing.assert_array_equal(_log_sum_exp(x[part], instructions), sums[part])


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_numbers_that_are_not_finite_are_as_in_xla(instructions):
    """NaN, infinities and the largest numbers give what XLA gives."""
    special = [np.nan, np.inf, -np.inf, 1e30, -1e30, 100, -100, 87.5, -88.5, 0]
    gate, up = (np.asarray(x, np.float32) for x in zip(*((a, b) for a in special for b in special)))  # noqa: B905
    both = np.stack([gate, up])[None]
    np.testing.assert_allclose(
        _gate(both, instructions), np.asarray(_xla_gated_silu(both)), rtol=1e-5, atol=1e-30
    )
    x, scale = _normal(len(special), 40), np.ones(40, np.float32)
    x[:, 3] = special
    np.testing.assert_allclose(
        _norm(x, scale, instructions),
        np.asarray(_xla_rms_norm(x, scale, eps=1e-5)),
        rtol=1e-5,
        atol=1e-30,
    )
    none = np.full((1, 40), -np.inf, np.float32)
    for each in (x, none):
        wanted = _xla_log_sum_exp(each)
        np.testing.assert_allclose(_log_sum_exp(each, instructions), wanted, rtol=1e-5)


def test_they_can_be_differentiated():
    """Gradients equal XLA's."""
    x, scale, both = (jnp.asarray(_normal(*s)) for s in ((5, 24), (24,), (5, 2, 24)))

    def loss(x, scale, both, implementation):
        norm = rms_norm(x, scale, eps=1e-5, implementation=implementation)
        layer = layer_norm(x, scale, scale, eps=1e-5, implementation=implementation)
        rows = log_sum_exp(norm * layer, implementation=implementation)[:, None]
        return jnp.sum(jnp.sin(norm) * gated_silu(both, implementation=implementation) * rows)

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)
    for got, wanted in zip(
        *(gradients(x, scale, both, each) for each in ("cpu", "xla")), strict=True
    ):
        assert_close(got, wanted)


def test_what_the_kernels_do_not_serve():
    """Other precisions and meshes are XLA's; several leading axes are rows."""
    x, scale = jnp.asarray(_normal(3, 4, 8)), jnp.ones(8)
    flat = rms_norm(x.reshape(12, 8), scale, eps=1e-5)
    np.testing.assert_array_equal(rms_norm(x, scale, eps=1e-5).reshape(12, 8), flat)
    with pytest.raises(NotImplementedError, match="serves float32 only"):
        rms_norm(x.astype(jnp.bfloat16), scale, eps=1e-5, implementation="cpu")
    with jax.set_mesh(make_mesh(tensor=2)), pytest.raises(NotImplementedError, match="mesh"):
        gated_silu(jnp.ones((2, 2, 8)), implementation="cpu")


@pytest.mark.usefixtures("unchecked_shapes")
def test_shapes_that_contradict_each_other_are_refused():
    """The errors name the shapes."""
    with pytest.raises(ValueError, match=r"x\(2, 8\) and scale\(7,\)"):
        rms_norm(jnp.ones((2, 8)), jnp.ones(7), eps=1e-5)
    with pytest.raises(ValueError, match=r"pass \[rows, 2, width\]"):
        gated_silu(jnp.ones((2, 3, 8)))
    with pytest.raises(ValueError, match=r"bias\(7,\) do not fit"):
        layer_norm(jnp.ones((2, 8)), jnp.ones(8), jnp.ones(7), eps=1e-5)
    with pytest.raises(ValueError, match=r"pass \[rows, width\]"):
        log_sum_exp(jnp.ones(3))


@pytest.mark.parametrize("implementation", ["xla", "triton_interpreted"])
@pytest.mark.parametrize("width", some([100, 1, 9000]))
def test_the_maximum_of_a_row_is_exact(implementation, width):
    """The lowest index of equals is returned, in the first and in later blocks; NaNs are told."""
    x = np.random.default_rng(width).integers(-50, 50, (6, width)).astype(np.float32)
    x[1] = -np.inf
    x[2, -1] = x[3, width // 2] = 99.0
    x[4, width // 2 :] = 77.0
    x[5, width // 3] = np.nan
    find = jax.jit(partial(row_maximum, implementation=implementation))
    index, value, has_nan = map(np.asarray, find(x))
    np.testing.assert_array_equal(index[:5], x[:5].argmax(axis=1))
    np.testing.assert_array_equal(value[:5], x[:5].max(axis=1))
    np.testing.assert_array_equal(has_nan, [False] * 5 + [True])
    assert 0 <= index[5] < width
