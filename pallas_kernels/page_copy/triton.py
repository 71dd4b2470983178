"""Page copies on NVIDIA GPUs from sm_80 on: a Pallas kernel compiled by Triton.

A page of a layer is contiguous memory, cut into blocks, and each program copies one block. Pages
are written in place, and the kernel touches no other part of the cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Int, Shaped

from jaxserve.kernels import gpu

_DTYPES = (
    *("float32", "bfloat16", "float16", "float8_e4m3fn"),
    *("int32", "uint32", "int16", "uint16", "int8", "uint8"),
)
# Bytes per program: four loads of 16 bytes for each of 128 threads.
_BLOCK_BYTES = 8192
# Smaller pages are not worth a program; XLA copies all such arrays of a tree in few kernels.
_MIN_PAGE_BYTES = 256


def gather_pages(
    pages: Shaped[Array, "layers pages *page"],
    source: Int[Array, " count"],
    *,
    interpret: bool = False,
) -> Shaped[Array, "layers count *page"]:
    return _copy(_Operands(source=source, read=pages), interpret)


def scatter_pages(
    pages: Shaped[Array, "layers pages *page"],
    target: Int[Array, " count"],
    values: Shaped[Array, "layers count *page"],
    *,
    interpret: bool = False,
) -> Shaped[Array, "layers pages *page"]:
    return _copy(_Operands(target=target, read=values, written=pages), interpret)


def move_pages(
    pages: Shaped[Array, "layers pages *page"],
    source: Int[Array, " count"],
    target: Int[Array, " count"],
    *,
    interpret: bool = False,
) -> Shaped[Array, "layers pages *page"]:
    return _copy(_Operands(source=source, target=target, written=pages), interpret)


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Operands:
    """Arrays in the call, references in the kernel; pages in the kernel are [layers, pages, size].

    Attributes:
      source, target: int32 [count]; None for 0, 1, 2 and so on.
      read: the array that is copied from; None for `written`.
      written: the array that is copied to; None for a new array of `count` pages. It is the last
        field, and so the kernel's last input, for `input_output_aliases`.
    """

    source: Any = None
    target: Any = None
    read: Any = None
    written: Any = None


def _copy(operands: _Operands, interpret: bool) -> jax.Array:
    if not interpret:
        gpu.require_triton()
    pages = operands.read if operands.written is None else operands.written
    layers, shape = pages.shape[0], pages.shape[2:]
    size = math.prod(shape)
    if size * pages.dtype.itemsize < _MIN_PAGE_BYTES:
        raise NotImplementedError(f"pages have less than {_MIN_PAGE_BYTES} bytes per layer")
    if pages.dtype.name not in _DTYPES:
        raise NotImplementedError(f"it serves pages in one of {_DTYPES}, not {pages.dtype}")
    gpu.require_addressable(operands.read, operands.written)
    places = operands.target if operands.source is None else operands.source
    count = places.shape[0]
    if count == 0:
        raise NotImplementedError("there are no pages to copy")
    num_pages = count if operands.written is None else pages.shape[1]
    block = min(gpu.power_of_two(size), _BLOCK_BYTES // pages.dtype.itemsize)
    blocks = -(-size // block)

    def flat(array: Any) -> Any:
        return None if array is None else array.reshape(*array.shape[:2], size)

    operands = _Operands(
        source=operands.source,
        target=operands.target,
        read=flat(operands.read),
        written=flat(operands.written),
    )
    is_in_place = operands.written is not None
    out = pl.pallas_call(
        partial(_copy_kernel, _Sizes(count=count, size=size, block=block, blocks=blocks)),
        grid=(layers * count * blocks,),
        out_shape=jax.ShapeDtypeStruct((layers, num_pages, size), pages.dtype),
        input_output_aliases={len(jax.tree.leaves(operands)) - 1: 0} if is_in_place else {},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="copy_pages",
    )(operands)
    return out.reshape(layers, num_pages, *shape)


@final
@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """The static parameters of the kernel."""

    count: int  # pages to copy
    size: int  # elements of a page
    block: int  # elements of a block
    blocks: int  # blocks of a page


def _copy_kernel(
    sizes: _Sizes,
    operands: _Operands,
    out_ref: Any,  # [layers, pages, size]
) -> None:
    program = pl.program_id(0)
    number = program // sizes.blocks % sizes.count
    layer = program // (sizes.blocks * sizes.count)
    source = number if operands.source is None else operands.source[number]
    target = number if operands.target is None else operands.target[number]
    element = program % sizes.blocks * sizes.block + jnp.arange(sizes.block, dtype=jnp.int32)
    mask = (element < sizes.size) & (target < out_ref.shape[1])
    read_ref = out_ref if operands.read is None else operands.read
    values = triton.load(read_ref.at[layer, source, element], mask=mask)
    triton.store(out_ref.at[layer, target, element], values, mask=mask)
