"""Named shapes for the tests and the gate of `rows`, whose rows have the same bits in any batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp

from jaxserve.kernels.fused_matmul.api import fused_matmul
from jaxserve.kernels.matmul import matmul


@final
@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A product of a layer, or of a model's head (`is_head`), whose result is in float32.

    With `is_transposed`, the weight is the embedding [columns, inputs].
    """

    name: str
    tokens: int
    inputs: int
    columns: int
    dtype: str = "bfloat16"
    has_bias: bool = False
    is_gated: bool = False
    has_residual: bool = False
    is_head: bool = False
    is_transposed: bool = False
    kernels = frozenset({"rowwise_product"})
    donated = ()

    def __str__(self) -> str:
        return f"rows-{self.name}-{self.inputs}x{self.columns}-{self.dtype}-{self.tokens}"

    def call(self, *, interpret: bool = False) -> tuple[Any, dict[str, Any]]:
        """Return a function for `jax.jit`, interpreted on request, and its abstract arguments."""
        arguments = jax.eval_shape(lambda: make_inputs(self, seed=0))
        if self.is_head:
            return partial(
                matmul,
                transposed=self.is_transposed,
                out_dtype=jnp.float32,
                implementation="triton_interpreted" if interpret else "triton",
            ), arguments
        return partial(
            fused_matmul,
            is_gated=self.is_gated,
            implementation="triton_rows_interpreted" if interpret else "triton_rows",
        ), arguments


def make_inputs(configuration: Configuration, seed: int) -> dict[str, Any]:
    each = configuration
    out = (2, each.columns) if each.is_gated else (each.columns,)
    weight = (*out, each.inputs) if each.is_transposed else (each.inputs, *out)
    keys = iter(jax.random.split(jax.random.key(seed), 4))

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return (scale * jax.random.normal(next(keys), shape)).astype(each.dtype)

    arrays: dict[str, Any] = {
        "x": normal(each.tokens, each.inputs),
        "weight": normal(*weight, scale=each.inputs**-0.5),
    }
    if each.has_bias:
        arrays["bias"] = normal(*out)
    if each.has_residual:
        arrays["residual"] = normal(each.tokens, each.columns)
    return arrays


def _kinds(
    tokens: int, dtype: str, *, embed: int, qkv: int, mlp: int, vocab: int
) -> tuple[Configuration, ...]:
    make = partial(Configuration, tokens=tokens, dtype=dtype)
    return (
        make(name="qkv", inputs=embed, columns=qkv, has_bias=True),
        make(name="gate_up", inputs=embed, columns=mlp, is_gated=True),
        make(name="down", inputs=mlp, columns=embed, has_residual=True),
        make(name="head", inputs=embed, columns=vocab, is_head=True),
        make(name="tied", inputs=embed, columns=vocab, is_head=True, is_transposed=True),
    )


# Sizes that fill no tile.
_UNEVEN = dict(embed=100, qkv=45, mlp=70, vocab=97)
TEST_CONFIGURATIONS = (
    *_kinds(70, "bfloat16", **_UNEVEN),
    *_kinds(5, "float32", **_UNEVEN),
    *_kinds(65, "float16", embed=64, qkv=96, mlp=128, vocab=64),
)
# The products of Llama 3 8B, and of a model whose sizes fill no tile.
_LLAMA_3_8B = dict(embed=4096, qkv=6144, mlp=14336, vocab=128256)
CONFIGURATIONS = (
    *(each for tokens in (1, 64, 2048) for each in _kinds(tokens, "bfloat16", **_LLAMA_3_8B)),
    *_kinds(300, "float32", **_LLAMA_3_8B),
    *_kinds(37, "float16", embed=1000, qkv=1416, mlp=2731, vocab=50257),
)
