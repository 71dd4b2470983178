"""Products whose rows have the same bits in any batch, on NVIDIA GPUs from sm_80 on.

A Pallas kernel, compiled by Triton. A program has one tile of tokens and one of columns, and adds
up all inputs in order, a block at a time. The tile of tokens has one size for any number of tokens;
the tile of columns follows from the weight alone. So the tensor cores run the same instructions in
the same order for a row of a decode step and for one of a long prompt. Libraries choose tiles, and
how inputs are split, by the number of tokens.
"""

from __future__ import annotations

import functools
import operator
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

_DTYPES = ("bfloat16", "float16", "float32")
# Tokens of a program, and inputs multiplied at a time, by bytes of a number. A warpgroup's
# instruction has 64 rows. Float32 is multiplied in full precision, without tensor cores.
_TILES = {2: 64, 4: 32}
_BLOCKS = {2: 64, 4: 32}
# Least columns of a weight -> columns of a program: narrow weights need narrow tiles to occupy
# all multiprocessors; wide tiles read the tokens less often.
_WIDTHS = {2: {16384: 128, 8192: 64, 0: 32}, 4: {0: 32}}


def matmul(
    x: Float[Array, "tokens in"],
    weight: Float[Array, " rows *columns"],
    *,
    transposed: bool,
    out_dtype: jax.typing.DTypeLike,
    interpret: bool = False,
) -> Float[Array, " tokens *out"]:
    """Implement `api.matmul`; `interpret` runs on any platform, for tests."""
    out = weight.shape[:1] if transposed else weight.shape[1:]
    matrix = weight if transposed else weight.reshape(weight.shape[0], -1)
    product = rowwise_product(
        x, matrix, transposed=transposed, out_dtype=out_dtype, interpret=interpret
    )
    return product.reshape(x.shape[0], *out)


def rowwise_product(
    x: Float[Array, "tokens in"],
    weight: Float[Array, "rows columns"],
    *,
    out_dtype: jax.typing.DTypeLike,
    transposed: bool = False,
    bias: Float[Array, " columns"] | None = None,
    is_gated: bool = False,
    residual: Float[Array, "tokens out"] | None = None,
    interpret: bool = False,
) -> Float[Array, "tokens out"]:
    """Return gate(x @ weight + bias) + residual, in float32 and rounded once.

    The weight is [in, columns], or [columns, in] with `transposed`. With `is_gated`, the result is
    silu(first half of the columns) * second half. Raise `NotImplementedError`
    for a case that it cannot serve, with the reason.
    """
    if not interpret:
        gpu.require_triton()
        dispatch.require_whole()
    if x.dtype != weight.dtype or x.dtype.name not in _DTYPES:
        raise NotImplementedError(
            f"it serves tokens and weights that are both in one of {_DTYPES}, not {x.dtype} and "
            f"{weight.dtype}"
        )
    if 0 in (*x.shape, *weight.shape):
        raise NotImplementedError(f"x{x.shape} or weight{weight.shape} is empty")
    (tokens, inputs), size = x.shape, x.dtype.itemsize
    columns = weight.shape[0 if transposed else 1] // (1 + is_gated)
    gpu.require_addressable(x, weight, jax.ShapeDtypeStruct((tokens, columns), out_dtype))
    tile, width, block = row_tile(columns, size)
    sizes = _Sizes(
        tokens=tokens,
        inputs=inputs,
        columns=columns,
        parts=1 + is_gated,
        transposed=transposed,
        tile=tile,
        width=width,
        block=block,
    )
    return pl.pallas_call(
        partial(_kernel, sizes),
        # Programs that read the same columns of the weight are neighbours.
        grid=(-(-tokens // sizes.tile), -(-columns // sizes.width)),
        out_shape=jax.ShapeDtypeStruct((tokens, columns), out_dtype),
        compiler_params=triton.CompilerParams(
            num_warps=4,
            num_stages=gpu.num_stages(
                4, size * sizes.block * (sizes.tile + sizes.parts * sizes.width)
            ),
        ),
        interpret=interpret,
        name="rowwise_product",
    )(_Operands(x=x, weight=weight, bias=bias, residual=residual))


def row_tile(columns: int, itemsize: int) -> tuple[int, int, int]:
    """Return a program's tokens and columns, and the inputs that it multiplies at a time.

    They follow from the columns of the weight, and the bytes of a number, alone.
    """
    width = next(width for least, width in _WIDTHS[itemsize].items() if columns >= least)
    return _TILES[itemsize], width, _BLOCKS[itemsize]


@final
@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """The static parameters of the kernel: `tile` tokens and `width` columns per program.

    `columns` counts the result's columns; `parts` is 2 for a gate and what it multiplies, else 1;
    `block` inputs are multiplied at a time.
    """

    tokens: int
    inputs: int
    columns: int
    parts: int
    transposed: bool
    tile: int
    width: int
    block: int


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Operands:
    """Arrays in the call, references in the kernel."""

    x: Any  # [tokens, inputs]
    weight: Any  # [inputs, parts * columns], or [parts * columns, inputs]
    bias: Any  # [parts * columns], or None
    residual: Any  # [tokens, columns], or None


def _kernel(
    sizes: _Sizes,
    operands: _Operands,
    out_ref: Any,  # [tokens, columns]
) -> None:
    token = pl.program_id(0) * sizes.tile + jnp.arange(sizes.tile, dtype=jnp.int32)
    column = pl.program_id(1) * sizes.width + jnp.arange(sizes.width, dtype=jnp.int32)
    is_token = token < sizes.tokens
    is_column = None if sizes.columns % sizes.width == 0 else column < sizes.columns
    exact = lax.Precision.HIGHEST if operands.x.dtype == jnp.float32 else None
    dot = partial(jnp.dot, precision=exact, preferred_element_type=jnp.float32)

    def one_block(block: jax.Array, products: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at = block * sizes.block + jnp.arange(sizes.block, dtype=jnp.int32)
        is_input = None if sizes.inputs % sizes.block == 0 else at < sizes.inputs
        x = load_tile(operands.x.at[token[:, None], at[None, :]], is_token, is_input)
        return tuple(
            product + dot(x, _weights(sizes, operands, part, at, column, is_input, is_column))
            for part, product in enumerate(products)
        )

    nothing = jnp.zeros((sizes.tile, sizes.width), jnp.float32)
    blocks = -(-sizes.inputs // sizes.block)
    products = lax.fori_loop(0, blocks, one_block, (nothing,) * sizes.parts)
    if operands.bias is not None:
        products = [
            product + _row(operands.bias, part * sizes.columns + column, is_column)
            for part, product in enumerate(products)
        ]
    out = products[0]
    if sizes.parts == 2:
        out = out / (1.0 + jnp.exp(-out)) * products[1]
    here = (token[:, None], column[None, :])
    if operands.residual is not None:
        out = out + load_tile(operands.residual.at[here], is_token, is_column).astype(jnp.float32)
    mask = is_token[:, None] if is_column is None else is_token[:, None] & is_column[None, :]
    triton.store(out_ref.at[here], out.astype(out_ref.dtype), mask=mask)


def _weights(
    sizes: _Sizes,
    operands: _Operands,
    part: int,
    at: jax.Array,
    column: jax.Array,
    is_input: jax.Array | None,
    is_column: jax.Array | None,
) -> jax.Array:
    """Return numbers [block, width] of the weight; zeros past its ends."""
    column = part * sizes.columns + column
    if sizes.transposed:
        here = operands.weight.at[column[:, None], at[None, :]]
        return load_tile(here, is_column, is_input).T
    return load_tile(operands.weight.at[at[:, None], column[None, :]], is_input, is_column)


def load_tile(here: Any, is_row: jax.Array | None, is_column: jax.Array | None) -> jax.Array:
    """Load a tile; masked elements are zero. None masks nothing."""
    masks = [] if is_row is None else [is_row[:, None]]
    masks += [] if is_column is None else [is_column[None, :]]
    if not masks:
        return triton.load(here)
    return triton.load(here, mask=functools.reduce(operator.and_, masks), other=0.0)


def _row(ref: Any, column: jax.Array, is_column: jax.Array | None) -> jax.Array:
    """Return float32 [1, width] of a one-dimensional array."""
    other = None if is_column is None else 0.0
    return triton.load(ref.at[column], mask=is_column, other=other).astype(jnp.float32)[None, :]
