"""The layout of a weight in eight or four bits, for reading it in one run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Integer, UInt8

# Columns that are stored together.
PANEL = 16


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A matrix [in, out] as unsigned codes, with scales; cut into panels of `PANEL` columns.

    The number at [k, n], in group g = k // group, is
    `channels[n] * (scales[g, n] * (code[k, n] - offset) + minima[g, n])`, or with zero points
    `channels[n] * scales[g, n] * (code[k, n] - zeros[g, n])`.

    codes      [*lead, panels, groups, steps, 16, 4]; a step is 4 numbers of each of 16 columns.
               With 4 bits, a byte has a number of an even step in its low half, and that of the
               next step in its high half, and `steps` counts such pairs.
    channels   [*lead, panels, 16]
    scales     [*lead, panels, groups, 16]: float16 or float32; None for ones
    minima     as scales; None for zeros
    zeros      as scales: uint8 or int16 zero points, in place of minima; None for `offset`

    With `is_float`, which needs 8 bits, a code is a float8_e4m3fn number, and there is no offset.

    `lead` are more axes of columns, each with panels of its own. The last panel and the last group
    are filled up with numbers that the product does not use: their scales or activations are zeros.
    """

    codes: UInt8[Array, " *lead panels groups steps 16 4"]
    channels: Float32[Array, " *lead panels 16"]
    scales: Float[Array, " *lead panels groups 16"] | None
    minima: Float[Array, " *lead panels groups 16"] | None
    bits: int = field(metadata=dict(static=True))
    zeros: Integer[Array, " *lead panels groups 16"] | None = None
    is_float: bool = field(default=False, metadata=dict(static=True))

    @property
    def group(self) -> int:
        """The numbers of a column that share a scale, and whose activations do."""
        return self.codes.shape[-3] * 32 // self.bits

    @property
    def offset(self) -> int:
        """The code of zero, before the minimum is added or where there are no zero points."""
        return 128 if self.bits == 8 else 8 if self.minima is None else 0

    @property
    def depth(self) -> int:
        """The rows of the matrix, filled up to whole groups."""
        return self.codes.shape[-4] * self.group


def pack(
    codes: UInt8[Array, " *lead out in"],
    channels: Float32[Array, " *lead out"],
    scales: Float[Array, " *lead out groups"] | None,
    minima: Float[Array, " *lead out groups"] | None,
    *,
    bits: int,
    group: int,
    zeros: Integer[Array, " *lead out groups"] | None = None,
    is_float: bool = False,
) -> PackedMatrix:
    """Return codes [*lead, out, in] in panels; `in` is a multiple of `group`.

    Raises:
      ValueError: `bits`, `group` or the depth is not one that can be packed.
    """
    if bits not in (4, 8) or group % (32 // bits) or codes.shape[-1] % group:
        raise ValueError(
            f"bits={bits}, group={group} and a depth of {codes.shape[-1]} cannot be packed; pass 4 "
            "or 8 bits, a group that is a multiple of 8 (4 with 8 bits), and whole groups"
        )
    *lead, out, depth = codes.shape
    missing = -out % PANEL

    def panels(x: Array, axis: int) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, missing)
        x = jnp.pad(x, widths)
        axis %= x.ndim
        return x.reshape(*x.shape[:axis], -1, PANEL, *x.shape[axis + 1 :])

    # [*lead, panels, 16, groups, steps, (2,) 4]
    halves = () if bits == 8 else (2,)
    codes = panels(codes, -2).reshape(
        *lead, -1, PANEL, depth // group, group * bits // 32, *halves, 4
    )
    if halves:
        codes = codes[..., 0, :] | (codes[..., 1, :] << 4)
    codes = jnp.moveaxis(codes, -4, -2)
    scales, minima, zeros = (
        None if x is None else jnp.swapaxes(panels(x, -2), -1, -2) for x in (scales, minima, zeros)
    )
    return PackedMatrix(codes, panels(channels, -1), scales, minima, bits, zeros, is_float)


def dequantise(packed: PackedMatrix) -> Float32[Array, " *lead out in"]:
    """Return the numbers [*lead, panels * 16, groups * group] that a packed matrix represents."""
    codes = jnp.moveaxis(packed.codes, -2, -4)  # [*lead, panels, 16, groups, steps, 4]
    if packed.bits == 4:
        codes = jnp.stack([codes & 15, codes >> 4], axis=-2)
    *first, groups = codes.shape[: packed.codes.ndim - 2]
    codes = codes.reshape(*first, groups, packed.group)
    if packed.is_float:
        numbers = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    else:
        zeros = packed.offset if packed.zeros is None else _turned(packed.zeros)
        numbers = codes.astype(jnp.float32) - zeros
    if packed.scales is not None:
        numbers = numbers * _turned(packed.scales)
    if packed.minima is not None:
        numbers = numbers + _turned(packed.minima)
    numbers = numbers * packed.channels[..., None, None]
    return numbers.reshape(*packed.codes.shape[:-5], -1, packed.depth)


def dequantised_rows(
    packed: PackedMatrix, index: Int32[Array, " rows"]
) -> Float32[Array, "rows in"]:
    """Return columns of the matrix, as rows: those of an embedding [out, in]."""
    panel, column = index // PANEL, index % PANEL

    def own(x: Array | None) -> Array | None:
        return None if x is None else x[panel, :, column][..., None]

    # Panels of one column.
    part = PackedMatrix(
        packed.codes[panel, :, :, column][:, :, :, None],
        packed.channels[panel, column][:, None],
        own(packed.scales),
        own(packed.minima),
        packed.bits,
        own(packed.zeros),
        packed.is_float,
    )
    return dequantise(part)


def _turned(x: Array) -> Float32[Array, " *lead columns groups 1"]:
    return jnp.swapaxes(x, -1, -2).astype(jnp.float32)[..., None]
