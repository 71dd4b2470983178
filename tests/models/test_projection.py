"""A product with its surroundings is the same on a mesh, and in one call as in its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxserve.kernels import gated_silu
from jaxserve.models.linear import Linear
from jaxserve.models.projection import fused, projected
from jaxserve.sharding import make_mesh, placed, state_shardings
from jaxserve.testing.tiny import tiny_llama
from tests.common.tiers import some


@dataclass(frozen=True)
class Case:
    """A product of a layer: its weight, and what surrounds it."""

    name: str
    has_norm: bool = False
    is_gated: bool = False
    has_residual: bool = False


CASES = (
    Case("wqkv", has_norm=True),
    Case("wo", has_residual=True),
    Case("gate_up", has_norm=True, is_gated=True),
    Case("down", has_residual=True),
)


@pytest.mark.parametrize("case", some(CASES, 0, 1), ids=lambda case: case.name)
@pytest.mark.parametrize("num_shards", some([1, 2]))
def test_one_call_agrees_with_the_parts(case, num_shards):
    """Norm, bias, gate and residual come where they belong, for weights split by either side."""
    model = tiny_llama()
    block: Any = model.blocks[0]
    owner = block.attention if hasattr(block.attention, case.name) else block.mlp
    weight = getattr(owner, case.name)
    num_in = 2 + 1 if case.name == "wo" else 1
    size = weight[...].shape
    x = jax.random.normal(jax.random.key(0), (5, *size[:num_in]))
    out = size[num_in:]
    names = weight.get_metadata()["logical_axes"]
    bias = nnx.Param(jax.random.normal(jax.random.key(1), out), logical_axes=names[num_in:])
    linear = Linear(weight, bias)
    kept = out[1:] if case.is_gated else out
    residual = jax.random.normal(jax.random.key(2), (5, *kept)) if case.has_residual else None
    norm = block.attention_norm if case.has_norm else None
    gate = gated_silu if case.is_gated else None
    wanted = projected(linear, x, None, norm=norm, gate=gate, residual=residual)
    scale = None if norm is None else norm.as_scale

    def one_call(linear: Linear) -> jax.Array:
        return fused(linear, x, scale, case.is_gated, residual)

    if num_shards == 1:
        got = one_call(linear)
    else:
        mesh = make_mesh(tensor=num_shards)
        state = nnx.State({"weight": weight, "bias": bias})
        held = placed(state, state_shardings(state, mesh))
        with jax.set_mesh(mesh):
            got = jax.jit(one_call)(Linear(held["weight"], held["bias"]))
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=2e-5, atol=2e-5)
