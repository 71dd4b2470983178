"""The product with a packed weight on NVIDIA GPUs from sm_80 on: a Pallas kernel by Triton.

The weight is the left operand of the tensor cores: a program has some panels of it, and a tile of
tokens. It reads each code once, in the order of memory, and widens it in registers.

Inputs are cut into splits, which depend on the weight's shape only. The sum of each split is in
order, and so is the sum of the splits. With few tokens, each split has its own program, so that
many programs read the weight; with many tokens, one program has all splits. The order of sums is
the same, and so are a row's bits.
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
from jaxtyping import Array, Float, UInt8

from jaxserve.kernels import dispatch, gpu
from jaxserve.kernels.quantised_matmul.packing import (
    PANEL,
    PackedMatrix,
    Rounding,
    round_activations,
)

_DTYPES = ("bfloat16", "float16")
# Most tokens for which each split has its own programs, and the tiles of tokens up to there.
_FEW_TOKENS = 64
_FEW_TILES = (16, 32, 64)
# The tile of many tokens, and that of a program with several splits, which has two sums.
_TILE, _TILE_OF_SPLITS = 128, 64
# The most programs that splits are made for, and the least blocks of inputs of a split.
_PROGRAMS = 256
_LEAST_BLOCKS = 8
_SPLITS = (8, 4, 2)
# Inputs that are multiplied at a time, and the least that tensor cores multiply in eight bits.
_BLOCK = 64
_LEAST_BLOCK = 32


def quantised_matmul(
    x: Float[Array, "tokens in"],
    codes: UInt8[Array, ...],  # the weight's, for the log
    weight: PackedMatrix,
    *,
    rounds_activations: Rounding | None,
    out_dtype: jax.typing.DTypeLike,
    interpret: bool = False,
) -> Float[Array, "tokens out"]:
    """Implement `api.quantised_matmul`, with the columns of all leading axes in one axis."""
    if not interpret:
        gpu.require_triton(jnp.float8_e4m3fn if weight.is_float else None)
        dispatch.require_whole()
    if x.dtype.name not in _DTYPES:
        raise NotImplementedError(f"it serves activations in one of {_DTYPES}, not {x.dtype}")
    if 0 in (*x.shape, *codes.shape):
        raise NotImplementedError(f"x{x.shape} or codes{codes.shape} is empty")
    gpu.require_addressable(codes)
    factors = None
    if rounds_activations is not None:
        _require_whole_columns(weight, rounds_activations)
        x, factors = round_activations(x, x.shape[1])
    sizes = _Sizes.of(x.shape, weight)
    operands = _Operands.of(x, None if factors is None else factors[:, 0], weight)
    totals = _call(sizes, operands, out_dtype, interpret=interpret)
    total = totals[0]
    if sizes.split_programs == 1:
        return total
    # The kernel does the same with splits that have their own programs.
    for split in totals[1:]:
        total = total + split
    out = total.astype(jnp.float32) * operands.channels
    return (out if factors is None else out * factors).astype(out_dtype)


def _require_whole_columns(weight: PackedMatrix, rounding: Rounding) -> None:
    parts = (weight.scales, weight.minima, weight.zeros)
    if rounding != "tokens":
        raise NotImplementedError("it rounds activations with a scale for each token, not by group")
    if weight.bits != 8 or weight.is_float or any(part is not None for part in parts):
        raise NotImplementedError(
            "it multiplies rounded activations with weights in int8 that have one scale a column"
        )


@final
@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """The static parameters of the kernel.

    Attributes:
      block: inputs that are multiplied at a time; a power of two.
      groups: number of groups in a block; 1 for groups that are not smaller.
      blocks: blocks of a split.
      splits: splits that one program sums.
      split_programs: programs that share the splits of a tile.
    """

    tokens: int
    inputs: int
    panels: int
    depth: int
    bits: int
    group: int
    offset: int
    is_float: bool
    tile: int
    panels_at_once: int
    block: int
    groups: int
    blocks: int
    splits: int
    split_programs: int
    warps: int
    stages: int

    @classmethod
    def of(cls, shape: tuple[int, ...], weight: PackedMatrix) -> _Sizes:
        """Return the parameters for activations of this shape.

        Raise `NotImplementedError` if blocks of a power of two do not fit the groups.
        """
        tokens, inputs = shape
        few = tokens <= _FEW_TOKENS
        panels = weight.channels.size // PANEL
        group, block = weight.group, _BLOCK
        if all(part is None for part in (weight.scales, weight.minima, weight.zeros)):
            group = block
        if gpu.power_of_two(group) != group:
            block = min(block, group & -group)
        if block < _LEAST_BLOCK:
            raise NotImplementedError(
                f"it serves groups that are a power of two or a multiple of {_LEAST_BLOCK}, not "
                f"of {group} inputs"
            )
        blocks, at_once = -(-weight.depth // block), 4 if few else 8
        # From the weight alone, since the bits of the result depend on it.
        splits = next(
            (
                number
                for number in _SPLITS
                if blocks % number == 0
                and blocks >= number * _LEAST_BLOCKS
                and -(-panels // 4) * number <= _PROGRAMS
            ),
            1,
        )
        return cls(
            tokens=tokens,
            inputs=inputs,
            panels=panels,
            depth=weight.depth,
            bits=weight.bits,
            group=group,
            offset=weight.offset,
            is_float=weight.is_float,
            tile=next(
                (size for size in _FEW_TILES if tokens <= size),
                _TILE if splits == 1 else _TILE_OF_SPLITS,
            ),
            panels_at_once=at_once,
            block=block,
            groups=max(1, block // group),
            blocks=blocks // splits,
            splits=1 if few else splits,
            split_programs=splits if few else 1,
            warps=at_once,
            stages=6 if few else 3,
        )

    @property
    def grid(self) -> tuple[int, int, int]:
        """Programs by tile of tokens, panels and split; neighbours share the weight."""
        tiles, columns = -(-self.tokens // self.tile), -(-self.panels // self.panels_at_once)
        return tiles, columns, self.split_programs


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Operands:
    """Arrays in the call, references in the kernel."""

    x: Any  # [tokens, inputs]
    factors: Any  # float32 [tokens], or None
    codes: Any  # uint8 [panels, bytes]
    channels: Any  # float32 [panels * 16]
    scales: Any  # [panels, groups * 16], or None
    minima: Any  # likewise
    zeros: Any  # likewise

    @classmethod
    def of(cls, x: jax.Array, factors: jax.Array | None, weight: PackedMatrix) -> _Operands:
        def panels(array: jax.Array | None) -> jax.Array | None:
            return None if array is None else array.reshape(weight.channels.size // PANEL, -1)

        return cls(
            x=x,
            factors=factors,
            codes=panels(weight.codes),
            channels=weight.channels.reshape(-1),
            scales=panels(weight.scales),
            minima=panels(weight.minima),
            zeros=panels(weight.zeros),
        )


def _call(
    sizes: _Sizes, operands: _Operands, out_dtype: jax.typing.DTypeLike, *, interpret: bool
) -> Array:
    """Return the product [1, tokens, out], or sums of each split [split_programs, tokens, out]."""
    dtype = _sum_dtype(operands) if sizes.split_programs > 1 else out_dtype
    return pl.pallas_call(
        partial(_kernel, sizes),
        grid=sizes.grid,
        out_shape=jax.ShapeDtypeStruct(
            (sizes.split_programs, sizes.tokens, sizes.panels * PANEL), dtype
        ),
        compiler_params=triton.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        interpret=interpret,
        name="quantised_matmul",
    )(operands)


def _sum_dtype(operands: _Operands) -> jnp.dtype:
    return jnp.dtype(jnp.int32 if operands.x.dtype == jnp.int8 else jnp.float32)


def _kernel(
    sizes: _Sizes,
    operands: _Operands,
    out_ref: Any,  # [split_programs, tokens, out]
) -> None:
    token = pl.program_id(0) * sizes.tile + jnp.arange(sizes.tile, dtype=jnp.int32)
    panel = pl.program_id(1) * sizes.panels_at_once
    split = pl.program_id(2)
    columns = sizes.panels_at_once * PANEL
    acc_dtype = _sum_dtype(operands)

    def one_block(block: jax.Array, total: jax.Array) -> jax.Array:
        wide = _widened(sizes, operands, panel, block)
        at = block * sizes.block + jnp.arange(sizes.block, dtype=jnp.int32)
        mask = (token < sizes.tokens)[:, None] & (at < sizes.inputs)[None, :]
        x = triton.load(
            operands.x.at[token[:, None], at[None, :]],
            mask=mask,
            other=0 if acc_dtype == jnp.int32 else 0.0,
        )
        return total + jnp.dot(wide, x.T, preferred_element_type=acc_dtype)

    def one_split(index: jax.Array) -> jax.Array:
        first = index * sizes.blocks
        nothing = jnp.zeros((columns, sizes.tile), acc_dtype)
        return lax.fori_loop(first, first + sizes.blocks, one_block, nothing)

    total = one_split(split)
    if sizes.splits > 1:  # a loop, since eight copies of the code need more registers
        total = lax.fori_loop(1, sizes.splits, lambda index, total: total + one_split(index), total)
    column = panel * PANEL + jnp.arange(columns, dtype=jnp.int32)
    if sizes.split_programs == 1:
        total = total.astype(jnp.float32) * _loaded(operands.channels, column)[:, None]
        if operands.factors is not None:
            total = total * _loaded(operands.factors, token)[None, :]
    exists = (column < sizes.panels * PANEL)[:, None] & (token < sizes.tokens)[None, :]
    here = out_ref.at[split, token[None, :], column[:, None]]
    triton.store(here, total.astype(out_ref.dtype), mask=exists)


def _loaded(ref: Any, index: jax.Array) -> jax.Array:
    """Return some elements of a one-dimensional array; zeros past its end."""
    return triton.load(ref.at[index], mask=index < ref.shape[0], other=0.0)


def _widened(sizes: _Sizes, operands: _Operands, panel: jax.Array, block: jax.Array) -> jax.Array:
    """Return numbers [columns, block] of a block of the weight, without the columns' scales."""
    panels, bits = sizes.panels_at_once, sizes.bits
    columns = panels * PANEL
    num_bytes = sizes.block * PANEL * bits // 8
    # A panel past the last one repeats it; its columns are not stored.
    row = jnp.minimum(panel + jnp.arange(panels, dtype=jnp.int32), sizes.panels - 1)
    at = block * num_bytes + jnp.arange(num_bytes, dtype=jnp.int32)
    is_uneven = sizes.depth % sizes.block != 0
    exists = None
    if is_uneven:
        exists = jnp.broadcast_to(at < sizes.depth * PANEL * bits // 8, (panels, num_bytes))
    codes = triton.load(
        operands.codes.at[row[:, None], at[None, :]], mask=exists, other=0 if is_uneven else None
    )
    codes = codes.reshape(panels, -1, PANEL, 4)
    if bits == 4:
        # [panels, steps / 2, 16, 4, 2]: the two numbers of a byte are of steps that are neighbours.
        codes = jnp.stack([codes & 15, codes >> 4], axis=-1).transpose(0, 2, 1, 4, 3)
    else:
        codes = codes.transpose(0, 2, 1, 3)
    codes = codes.reshape(columns, sizes.block)
    if operands.x.dtype == jnp.int8:
        return lax.bitcast_convert_type(codes ^ 128, jnp.int8)
    if sizes.is_float:
        wide = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    else:
        wide = codes.astype(jnp.float32)
    wide = wide.reshape(columns, sizes.groups, sizes.block // sizes.groups)

    column = jnp.arange(columns, dtype=jnp.int32)
    own = jnp.minimum(panel + column // PANEL, sizes.panels - 1)
    group = block * sizes.block // sizes.group + jnp.arange(sizes.groups, dtype=jnp.int32)

    def of_groups(ref: Any) -> jax.Array:
        found = triton.load(
            ref.at[own[:, None], group[None, :] * PANEL + (column % PANEL)[:, None]],
            mask=jnp.broadcast_to(group < -(-sizes.depth // sizes.group), (columns, len(group))),
            other=0 if jnp.issubdtype(ref.dtype, jnp.integer) else 0.0,
        )
        return found.astype(jnp.float32)[:, :, None]

    if operands.zeros is not None:
        wide = wide - of_groups(operands.zeros)
    elif not sizes.is_float and sizes.offset:
        wide = wide - float(sizes.offset)
    if operands.scales is not None:
        wide = wide * of_groups(operands.scales)
    if operands.minima is not None:
        wide = wide + of_groups(operands.minima)
    return wide.reshape(columns, sizes.block).astype(operands.x.dtype)
