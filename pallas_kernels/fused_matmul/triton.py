"""The fused product on NVIDIA GPUs from sm_80 on: a Pallas kernel compiled by Triton.

It serves steps of few tokens, whose time is that of reading the weights. A program has all tokens
and some columns. It reads its part of the weight once, and the tokens from the device's cache. The
norm needs no pass of its own: the factor of a token scales the token's results, and the sum of
squares is taken of the inputs that the product reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from jaxserve.kernels import dispatch, gpu
from jaxserve.kernels.fused_matmul.operands import RMSScale

# With more tokens, programs would read them from the device's cache for longer than they read
# weights from memory, and columns for larger tiles are too few to fill the device.
_MAX_TOKENS = 64
# Rows of the tile of tokens -> columns of the weight that a program then has.
_TILES = {16: 32, 32: 32, 64: 64}
# Inputs that are multiplied at a time.
_BLOCK = 64


def fused_matmul(
    x: Float[Array, "tokens in"],
    weight: Float[Array, " in *out"],
    *,
    norm: RMSScale | None,
    bias: Float[Array, " *out"] | None,
    is_gated: bool,
    residual: Float[Array, " tokens *kept"] | None,
    interpret: bool = False,
) -> Float[Array, " tokens *kept"]:
    """Implement `api.fused_matmul`; `interpret` runs on any platform, for tests."""
    if not interpret:
        gpu.require_triton()
        dispatch.require_whole()
    given = (x, weight, *(each for each in (bias, residual) if each is not None))
    if {each.dtype.name for each in given} != {"bfloat16"}:
        raise NotImplementedError(
            f"it serves bfloat16, not {', '.join(each.dtype.name for each in given)}"
        )
    tokens, inputs = x.shape
    if not 0 < tokens <= _MAX_TOKENS:
        raise NotImplementedError(f"it serves 1 to {_MAX_TOKENS} tokens, not {tokens}")
    parts, columns = 1 + is_gated, weight[0].size // (1 + is_gated)
    tile = next(size for size in _TILES if tokens <= size)
    if inputs % _BLOCK or columns % _TILES[tile]:
        raise NotImplementedError(
            f"it serves multiples of {_BLOCK} inputs and of {_TILES[tile]} columns, not {inputs} "
            f"and {columns}"
        )
    gpu.require_addressable(weight)
    sizes = _Sizes(
        tokens=tokens,
        inputs=inputs,
        columns=columns,
        parts=parts,
        tile=tile,
        width=_TILES[tile],
        eps=0.0 if norm is None else norm.eps,
        offset=0.0 if norm is None else norm.offset,
    )
    operands = _Operands(
        x=x,
        weight=weight.reshape(inputs, parts * columns),
        scale=None if norm is None else norm.scale,
        bias=None if bias is None else bias.reshape(parts * columns),
        residual=None if residual is None else residual.reshape(tokens, columns),
    )
    out = pl.pallas_call(
        partial(_kernel, sizes),
        grid=(columns // sizes.width,),
        out_shape=jax.ShapeDtypeStruct((tokens, columns), x.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=sizes.stages),
        interpret=interpret,
        name="fused_matmul",
    )(operands)
    return out.reshape(tokens, *weight.shape[1 + is_gated :])


@final
@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """The static parameters of the kernel: `tile` tokens (with padding) and `width` columns per
    program.

    `columns` counts the result's columns; `parts` is 2 for a gate and what it multiplies, else 1.
    """

    tokens: int
    inputs: int
    columns: int
    parts: int
    tile: int
    width: int
    eps: float
    offset: float

    @property
    def stages(self) -> int:
        """Blocks of inputs on their way from memory."""
        block_bytes = 2 * _BLOCK * (self.tile + self.parts * self.width)
        sums_bytes = 4 * self.tile * self.width
        return gpu.num_stages(6 if self.parts == 1 else 4, block_bytes, sums_bytes)


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Operands:
    """Arrays in the call, references in the kernel."""

    x: Any  # [tokens, inputs]
    weight: Any  # [inputs, parts * columns]
    scale: Any  # [inputs], or None
    bias: Any  # [parts * columns], or None
    residual: Any  # [tokens, columns], or None


def _kernel(
    sizes: _Sizes,
    operands: _Operands,
    out_ref: Any,  # [tokens, columns]
) -> None:
    token = jnp.arange(sizes.tile, dtype=jnp.int32)
    column = pl.program_id(0) * sizes.width + jnp.arange(sizes.width, dtype=jnp.int32)
    is_token = (token < sizes.tokens)[:, None]

    def one_block(block: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        squares, *products = sums
        at = block * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)
        x = triton.load(operands.x.at[token[:, None], at[None, :]], mask=is_token, other=0.0)
        if operands.scale is not None:
            wide = x.astype(jnp.float32)
            squares = squares + jnp.sum(wide * wide, axis=1)
            scale = triton.load(operands.scale.at[at]).astype(jnp.float32) + sizes.offset
            x = (wide * scale[None, :]).astype(x.dtype)
        for part in range(sizes.parts):
            here = operands.weight.at[at[:, None], (part * sizes.columns + column)[None, :]]
            products[part] += jnp.dot(x, triton.load(here), preferred_element_type=jnp.float32)
        return squares, *products

    nothing = jnp.zeros((sizes.tile, sizes.width), jnp.float32)
    start = (jnp.zeros((sizes.tile,), jnp.float32), *(nothing,) * sizes.parts)
    squares, *products = lax.fori_loop(0, sizes.inputs // _BLOCK, one_block, start)
    if operands.scale is not None:
        factor = lax.rsqrt(squares / sizes.inputs + sizes.eps)
        products = [product * factor[:, None] for product in products]
    if operands.bias is not None:
        products = [
            product
            + triton.load(operands.bias.at[part * sizes.columns + column]).astype(jnp.float32)[None]
            for part, product in enumerate(products)
        ]
    out = products[0]
    if sizes.parts == 2:
        out = out / (1.0 + jnp.exp(-out)) * products[1]
    here = (token[:, None], column[None, :])
    if operands.residual is not None:
        kept = triton.load(operands.residual.at[here], mask=is_token, other=0.0)
        out = out + kept.astype(jnp.float32)
    triton.store(out_ref.at[here], out.astype(out_ref.dtype), mask=is_token)
