"""Named shapes for the tests, the gate and the benchmarks of fused products."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.fused_matmul.api import fused_matmul
from jaxserve.kernels.fused_matmul.operands import RMSScale


@final
@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A product of a layer: of attention (with a norm before it, or a residual after it), or of
    an MLP (gated, or with a residual).
    """

    name: str
    tokens: int
    inputs: int
    columns: int
    has_norm: bool = False
    has_bias: bool = False
    is_gated: bool = False
    has_residual: bool = False
    kernels = frozenset({"fused_matmul"})
    donated = ()

    def __str__(self) -> str:
        return f"fused-{self.name}-{self.inputs}x{self.columns}-{self.tokens}"

    @property
    def moved_bytes(self) -> int:
        """Bytes of the weight, the inputs, the results and the residual stream, each once."""
        numbers = self.inputs * self.columns * (1 + self.is_gated)
        numbers += self.tokens * (self.inputs + self.columns * (1 + self.has_residual))
        return 2 * numbers

    def call(self) -> tuple[Any, dict[str, Any]]:
        return partial(fused_matmul, is_gated=self.is_gated), jax.eval_shape(
            lambda: make_inputs(self, seed=0)
        )


def make_inputs(configuration: Configuration, seed: int) -> dict[str, Any]:
    """Return the arrays of a call, in bfloat16."""
    each = configuration
    out = (2, each.columns) if each.is_gated else (each.columns,)

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), int(np.prod(shape)))
        return (scale * jax.random.normal(key, shape)).astype(jnp.bfloat16)

    norm = RMSScale(1 + normal(each.inputs, scale=0.1), 1e-5) if each.has_norm else None
    return dict(
        x=normal(each.tokens, each.inputs, scale=3.0),
        weight=normal(each.inputs, *out, scale=each.inputs**-0.5),
        norm=norm,
        bias=normal(*out) if each.has_bias else None,
        residual=normal(each.tokens, each.columns) if each.has_residual else None,
    )


def _layer(tokens: int, embed: int, qkv: int, heads: int, mlp: int) -> tuple[Configuration, ...]:
    make = partial(Configuration, tokens=tokens)
    return (
        make(name="qkv", inputs=embed, columns=qkv, has_norm=True, has_bias=tokens == 16),
        make(name="out", inputs=heads, columns=embed, has_residual=True),
        make(name="gate_up", inputs=embed, columns=mlp, has_norm=True, is_gated=True),
        make(name="down", inputs=mlp, columns=embed, has_residual=True),
    )


TEST_CONFIGURATIONS = (*_layer(3, 128, 192, 64, 256), *_layer(64, 128, 192, 64, 128))
# The products of a layer of Llama 3 8B.
CONFIGURATIONS = tuple(
    configuration
    for tokens in (1, 16, 32, 64)
    for configuration in _layer(tokens, 4096, 6144, 4096, 14336)
)
