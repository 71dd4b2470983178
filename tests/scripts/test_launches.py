"""Launches are counted in compiled modules: those of a layer, and all of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from scripts.launches import launches, launches_a_layer, made_arrays, sums_of_floats


def _scanned(num_layers: int, products: int) -> str:
    """Return HLO of this many layers, with this many matrix products and one sort each."""

    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        for _ in range(products):
            x = jnp.sort(x) @ weight
        return x, None

    weights = jax.ShapeDtypeStruct((num_layers, 64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    compiled = (
        jax.jit(lambda x, weights: lax.scan(layer, x, weights)[0]).lower(x, weights).compile()
    )
    return compiled.as_text()


def test_a_layer_of_a_loop():
    """More work per layer gives more launches, more layers do not; a wrong number raises."""
    one, two = _scanned(5, 1), _scanned(5, 2)
    extra = launches_a_layer(two, 5) - launches_a_layer(one, 5)
    assert extra >= 2 and launches(two) - launches(one) == extra
    assert launches_a_layer(_scanned(7, 1), 7) == launches_a_layer(one, 5)
    with pytest.raises(ValueError, match="0 loops run 6 times"):
        launches_a_layer(one, 6)


def test_every_computation_that_runs_is_counted():
    """Bodies and conditions of loops and calls count, those of fusions and sorts do not.

    An asynchronous instruction counts once.
    """
    hlo = """HloModule m, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %copy.1 = f32[4]{0} copy(%p)
}

%body (a: (s32[], f32[4])) -> (s32[], f32[4]) {
  %a = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%a), index=1
  %y = (f32[4]{0}, /*index=1*/f32[2]{0}) fusion(%x), kind=kLoop, calls=%fused
  %start = ((f32[4]{0}), f32[4]{0}, u32[]) fusion-start(%x), kind=kLoop, calls=%fused
  %done = f32[4]{0} fusion-done(%start)
  ROOT %t = (s32[], f32[4]{0}) custom-call(%y, %done), custom_call_target="gemm"
}

%condition (a: (s32[], f32[4])) -> pred[] {
  %a = (s32[], f32[4]{0}) parameter(0)
  ROOT %less = pred[] fusion(%a), kind=kLoop, calls=%fused
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %c = s32[] constant(0)
  %t = (s32[], f32[4]{0}) tuple(%c, %p)
  %w = (s32[], f32[4]{0}) while(%t), condition=%condition, body=%body
  %n = (s32[], f32[4]{0}) while(%w), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %r = f32[4]{0} get-tuple-element(%n), index=1
}
"""  # noqa: E501
    assert launches(hlo) == 4 + 3
    assert launches_a_layer(hlo, 3) == 3


def test_arrays_that_are_written():
    """Outputs of fusions and copies count, also in tuples; views, kernels and fused ones do not."""
    hlo = """HloModule m, is_scheduled=true

%fused (p: u8[4,6]) -> bf16[24] {
  %p = u8[4,6]{1,0} parameter(0)
  ROOT %wide = bf16[24]{0} convert(%p)
}

ENTRY %main (p: u8[4,6]) -> f32[4] {
  %p = u8[4,6]{1,0} parameter(0)
  %view = u8[24]{0} bitcast(%p)
  %kernel = f32[24]{0} custom-call(%view), custom_call_target="ours"
  %wide = bf16[24]{0} fusion(%view), kind=kLoop, calls=%fused
  %two = (f32[4]{0}, /*index=1*/s8[2,12]{1,0}) fusion(%view), kind=kLoop, calls=%fused
  %small = f32[23]{0} copy(%view)
  ROOT %r = f32[4]{0} get-tuple-element(%two), index=0
}
"""
    found = made_arrays(hlo, {24})
    assert [line.split(" = ")[0] for line in found] == ["%wide", "%two"]
    assert made_arrays(hlo, {24}, "[us]8") == found[1:]


def test_sums_of_floats_are_found():
    """Products and sums of floats are, also in fusions; integers, maxima and kernels are not."""
    x = jnp.ones((8, 64))
    found = []
    for function in (
        lambda x: x @ x.T,
        lambda x: jnp.exp(x).sum(axis=1) * 2,
        lambda x: jax.nn.softmax(x.astype(jnp.bfloat16)),
        lambda x: x.max(axis=1),
        lambda x: x.astype(jnp.int32).sum(axis=1),
        lambda x: x.at[jnp.asarray([1, 2])].add(1.0),
    ):
        found.append(bool(sums_of_floats(jax.jit(function).lower(x).compile().as_text())))
    assert found == [True] * 3 + [False] * 3
    library = '  %g = (f32[8,8]{1,0}, s8[9]{0}) custom-call(%a), custom_call_target="__cublas$gemm"'
    ours = '  %k = bf16[8,8]{1,0} custom-call(%a), custom_call_target="__gpu$xla.gpu.triton"'
    assert len(sums_of_floats(f"{library}\n{ours}")) == 1
