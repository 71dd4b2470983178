"""Products of groups of tokens with one matrix each, on NVIDIA GPUs from sm_80 on.

A Pallas kernel, compiled by Triton. A program has one tile of tokens of one group and one tile of
columns, so it reads one matrix. Groups have any sizes, which only the device knows. The grid has as
many tiles as the worst sizes need. Each program adds up the tiles of the groups to find its own
group; programs past the last tile do nothing.

A row has the same bits in any batch if `batch_invariant` fixes the tile, as in `matmul.triton`.
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
from jaxtyping import Array, Float, Int32

from jaxserve.kernels import dispatch, gpu
from jaxserve.kernels.matmul import xla
from jaxserve.kernels.matmul.triton import load_tile, row_tile

_DTYPES = ("bfloat16", "float16", "float32")
# Tiles that share the columns of a matrix in the device's cache before the next columns begin.
_NEIGHBOURS = 8
# Programs that occupy a device; narrower tiles of columns make more of them.
_MIN_PROGRAMS = 512
# Inputs that are multiplied at a time; the tensor cores need 16.
_BLOCK, _MIN_BLOCK = 64, 16


@final
@dataclass(frozen=True, kw_only=True)
class Tiling:
    """The tile of a program: tokens, columns, and the inputs that it multiplies at a time."""

    tokens: int
    columns: int
    block: int
    warps: int
    stages: int

    def num_tiles(self, tokens: int, matrices: int) -> int:
        """Return the most tiles that any sizes of groups need; each group may begin a tile.

        The tokens after the last group are a group, too.
        """
        groups = min(tokens, matrices + 1)
        return (tokens + groups * (self.tokens - 1)) // self.tokens


def tiling(
    tokens: int, weight: tuple[int, ...], itemsize: int, *, batch_invariant: bool = False
) -> Tiling:
    """Return the tile of a product of `tokens` rows with a weight [matrices, in, out].

    Tiles have room for about twice the tokens of an average group, up to 128. A group with fewer
    tokens than 128 is bound by the memory that its matrix is read from, on every GPU that this
    serves, so empty rows of a tile cost little. With `batch_invariant`, the tile follows from the
    weight alone.
    """
    matrices, inputs, columns = weight
    if batch_invariant:
        rows, width, block = row_tile(matrices * columns, itemsize)
        stages = gpu.num_stages(4, itemsize * block * (rows + width))
        return Tiling(tokens=rows, columns=width, block=block, warps=4, stages=stages)
    block = min(_BLOCK, max(_MIN_BLOCK, gpu.power_of_two(inputs)))
    if itemsize == 4:  # multiplied in full precision, without tensor cores
        return Tiling(tokens=32, columns=32, block=min(block, 32), warps=4, stages=3)
    rows = min(128, max(16, gpu.power_of_two(2 * -(-tokens // matrices))))
    num_tiles = min(tokens, matrices) + tokens // rows
    width = 128
    while width > 32 and num_tiles * -(-columns // width) < _MIN_PROGRAMS:
        width //= 2
    # Low tiles wait for the memory: more blocks of inputs on their way, and fewer warps.
    warps, stages = (4, 5) if rows <= 32 else (4, 3) if rows * width <= 8192 else (8, 3)
    stages = gpu.num_stages(stages, itemsize * block * (rows + width))
    return Tiling(tokens=rows, columns=width, block=block, warps=warps, stages=stages)


def grouped_matmul(
    x: Float[Array, "tokens in"],
    weight: Float[Array, " matrices in out"],
    sizes: Int32[Array, " matrices"],
    *,
    batch_invariant: bool = False,
    interpret: bool = False,
) -> Float[Array, "tokens out"]:
    """Implement `api.grouped_matmul`; `interpret` runs on any platform, for tests."""
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
    gpu.require_addressable(x, weight, jax.ShapeDtypeStruct((x.shape[0], weight.shape[2]), x.dtype))
    tile = tiling(x.shape[0], weight.shape, x.dtype.itemsize, batch_invariant=batch_invariant)
    return _product(interpret, tile, x, weight, sizes)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _product(
    interpret: bool,
    tile: Tiling,
    x: Float[Array, "tokens in"],
    weight: Float[Array, " matrices in out"],
    sizes: Int32[Array, " matrices"],
) -> Float[Array, "tokens out"]:
    tokens, (matrices, _, columns) = x.shape[0], weight.shape
    num_tiles = tile.num_tiles(tokens, matrices)
    return pl.pallas_call(
        partial(_kernel, tile),
        # Programs with the same columns of a matrix are neighbours, then those with other columns.
        grid=(_NEIGHBOURS, -(-columns // tile.columns), -(-num_tiles // _NEIGHBOURS)),
        out_shape=jax.ShapeDtypeStruct((tokens, columns), x.dtype),
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="grouped_matmul",
    )(x, weight, sizes)


@_product.defjvp
def _derivative(
    interpret: bool,
    tile: Tiling,
    values: tuple[jax.Array, jax.Array, jax.Array],
    tangents: tuple[jax.Array, jax.Array, Any],  # sizes have none
) -> tuple[jax.Array, jax.Array]:
    """Compute the tangent with XLA's product, which XLA can transpose."""
    (x, weight, sizes), (dx, dweight, _) = values, tangents
    tangent = xla.grouped_matmul(dx, weight, sizes) + xla.grouped_matmul(x, dweight, sizes)
    return _product(interpret, tile, *values), tangent


def _kernel(
    tile: Tiling,
    x_ref: Any,  # [tokens, inputs]
    weight_ref: Any,  # [matrices, inputs, columns]
    sizes_ref: Any,  # int32 [matrices]
    out_ref: Any,  # [tokens, columns]
) -> None:
    tokens, inputs = x_ref.shape
    matrices, _, columns = weight_ref.shape
    number = pl.program_id(2) * _NEIGHBOURS + pl.program_id(0)
    matrix, begin, end = _group_of(number, tile.tokens, tokens, matrices, sizes_ref)
    token = begin + jnp.arange(tile.tokens, dtype=jnp.int32)
    column = pl.program_id(1) * tile.columns + jnp.arange(tile.columns, dtype=jnp.int32)
    is_token = token < end
    is_column = None if columns % tile.columns == 0 else column < columns
    exact = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    def one_block(block: jax.Array, product: jax.Array) -> jax.Array:
        at = block * tile.block + jnp.arange(tile.block, dtype=jnp.int32)
        is_input = None if inputs % tile.block == 0 else at < inputs
        x = load_tile(x_ref.at[token[:, None], at[None, :]], is_token, is_input)
        weight = load_tile(weight_ref.at[matrix, at[:, None], column[None, :]], is_input, is_column)
        return product + jnp.dot(x, weight, precision=exact, preferred_element_type=jnp.float32)

    # Tokens without a matrix get zeros.
    blocks = (matrix < matrices).astype(jnp.int32) * -(-inputs // tile.block)
    nothing = jnp.zeros((tile.tokens, tile.columns), jnp.float32)
    product = lax.fori_loop(0, blocks, one_block, nothing)
    mask = is_token[:, None] if is_column is None else is_token[:, None] & is_column[None, :]
    triton.store(
        out_ref.at[token[:, None], column[None, :]], product.astype(out_ref.dtype), mask=mask
    )


def _group_of(
    number: jax.Array,
    tile: int,
    tokens: int,
    matrices: int,
    sizes_ref: Any,  # int32 [matrices]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the group of a tile, the tile's first token, and the end of the group.

    Tokens after the last group are group `matrices`. A tile past the last one has no tokens.
    """
    group = jnp.arange(gpu.power_of_two(matrices + 1), dtype=jnp.int32)
    sizes = triton.load(sizes_ref.at[group], mask=group < matrices, other=0)
    sizes = jnp.where(group == matrices, tokens - jnp.sum(sizes), sizes)
    tiles = lax.div(sizes + (tile - 1), jnp.full_like(sizes, tile))
    is_before = lax.cumsum(tiles) <= number
    own = jnp.sum(is_before.astype(jnp.int32))
    start = jnp.sum(jnp.where(is_before, sizes, 0))
    begin = start + (number - jnp.sum(jnp.where(is_before, tiles, 0))) * tile
    return own, begin, start + jnp.sum(jnp.where(group == own, sizes, 0))
