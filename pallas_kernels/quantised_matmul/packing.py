"""The layout of a weight in eight or four bits, for reading it in one run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int8, Int32, Integer, UInt8

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
               With 4 bits, the low half of a byte is a number of an even step, the high half is
               that of the next step, and `steps` counts such pairs.
    channels   [*lead, panels, 16]
    scales     [*lead, panels, groups, 16]: float16 or float32; None for ones
    minima     as scales; None for zeros
    zeros      as scales: uint8 or int16 zero points, instead of minima; None for `offset`

    With `is_float`, which needs 8 bits, a code is a float8_e4m3fn number, and there is no offset.

    `lead` are additional axes of columns, each with its own panels. The last panel and the last
    group are padded with numbers that the product ignores: their scales or activations are zeros.
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
        """The number of elements of a column, or of activations, that share a scale."""
        return self.codes.shape[-3] * 32 // self.bits

    @property
    def offset(self) -> int:
        """The code of zero, before the minimum is added or if there are no zero points."""
        return 128 if self.bits == 8 else 8 if self.minima is None else 0

    @property
    def depth(self) -> int:
        """The number of rows of the matrix, padded to whole groups."""
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

    Raise ValueError if `bits`, `group` or the depth cannot be packed.
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


# Elements that share a scale when activations are rounded to int8: a group of a row, or a row.
Rounding = Literal["groups", "tokens"]
# A group of activations whose largest magnitude is below this counts as zeros.
TINY = 2.0**-100


def quantise(
    matrix: Float[Array, " *lead out in"], *, bits: int, group: int, has_minima: bool = False
) -> PackedMatrix:
    """Return a weight [*lead, out, in] rounded to few bits.

    With 8 bits, a column (an index of `out`) has one scale; activations are rounded in groups of
    `group`. With 4 bits, each group of a column has its own scale, and with `has_minima` a minimum.
    If a number of a column is not finite, the whole column becomes NaN.
    """
    matrix = matrix.astype(jnp.float32)
    # Checked separately, since a maximum on CPUs can miss a NaN.
    is_broken = ~jnp.isfinite(matrix).all(axis=-1)
    depth = matrix.shape[-1]
    matrix = jnp.pad(matrix, [(0, 0)] * (matrix.ndim - 1) + [(0, -depth % group)])
    if bits == 8:
        largest = jnp.max(jnp.abs(matrix), axis=-1)
        scaled = _divided(matrix, largest[..., None] / 127.0)
        codes = jnp.clip(jnp.round(scaled), -127, 127) + 128.0
        return pack(
            _bytes(codes), _nan_where(is_broken, largest / 127.0), None, None, bits=8, group=group
        )
    grouped = matrix.reshape(*matrix.shape[:-1], -1, group)
    low, high = jnp.min(grouped, axis=-1), jnp.max(grouped, axis=-1)
    if has_minima:
        low, high = jnp.minimum(low, 0.0), jnp.maximum(high, 0.0)
        scales, minima = (high - low) / 15.0, low
    else:
        # The number with the largest magnitude becomes -8 exactly.
        extreme = jnp.where(high > -low, high, low)
        scales, minima = extreme / -8.0, jnp.zeros_like(low)
    # Scales are float16 fractions of the column's largest scale, so that any range fits.
    channels = jnp.max(jnp.maximum(jnp.abs(scales), jnp.abs(minima)), axis=-1)
    whole = channels[..., None]
    scales, minima = (_divided(x, whole).astype(jnp.float16) for x in (scales, minima))
    unit = _divided(grouped, whole[..., None])
    offset = 0.0 if has_minima else 8.0
    codes = _divided(unit - minima[..., None].astype(jnp.float32), scales[..., None]) + offset
    codes = jnp.clip(jnp.round(codes), 0, 15).reshape(matrix.shape)
    kept = minima if has_minima else None
    channels = _nan_where(is_broken, channels)
    return pack(_bytes(codes), channels, scales, kept, bits=4, group=group)


def quantise_float8(matrix: Float[Array, " *lead out in"], *, group: int) -> PackedMatrix:
    """Return a weight [*lead, out, in] rounded to float8_e4m3fn, with one scale per column.

    The largest magnitude of a column becomes 448, the largest number of the format. If a number of
    a column is not finite, the whole column becomes NaN.
    """
    matrix = matrix.astype(jnp.float32)
    is_broken = ~jnp.isfinite(matrix).all(axis=-1)
    depth = matrix.shape[-1]
    matrix = jnp.pad(matrix, [(0, 0)] * (matrix.ndim - 1) + [(0, -depth % group)])
    scales = jnp.max(jnp.abs(matrix), axis=-1) / float(jnp.finfo(jnp.float8_e4m3fn).max)
    numbers = jnp.nan_to_num(_divided(matrix, scales[..., None])).astype(jnp.float8_e4m3fn)
    codes = lax.bitcast_convert_type(numbers, jnp.uint8)
    scales = _nan_where(is_broken, scales)
    return pack(codes, scales, None, None, bits=8, group=group, is_float=True)


def round_activations(
    x: Float[Array, "tokens in"], group: int
) -> tuple[Int8[Array, "tokens padded"], Float32[Array, "tokens groups"]]:
    """Return activations in int8, padded to whole groups, and a scale for each row and group.

    The scale of a group with a number that is not finite is NaN.
    """
    tokens, depth = x.shape
    x = jnp.pad(x.astype(jnp.float32), [(0, 0), (0, -depth % group)])
    grouped = x.reshape(tokens, -1, group)
    # A maximum on CPUs can miss a NaN, but not infinity.
    magnitudes = jnp.where(jnp.isfinite(grouped), jnp.abs(grouped), jnp.inf)
    largest = jnp.max(magnitudes, axis=-1)
    is_zero = largest < TINY
    inverse = 127.0 / jnp.where(is_zero, 1.0, largest)
    scales = jnp.where(is_zero, 0.0, jnp.where(jnp.isinf(largest), jnp.nan, largest / 127.0))
    codes = jnp.nan_to_num(jnp.round(grouped * inverse[..., None]), posinf=0.0, neginf=0.0)
    return codes.astype(jnp.int8).reshape(tokens, -1), scales


def rounded_activations(x: Float[Array, "tokens in"], group: int) -> Float32[Array, "tokens in"]:
    """Return activations as `round_activations` represents them, in float32."""
    codes, scales = round_activations(x, group)
    numbers = codes.reshape(len(x), -1, group).astype(jnp.float32) * scales[..., None]
    return numbers.reshape(len(x), -1)[:, : x.shape[1]]


def _divided(x: Float[Array, ...], by: Float[Array, ...]) -> Float32[Array, ...]:
    """Return x / by, and zeros where `by` is zero."""
    by = by.astype(jnp.float32)
    return jnp.where(by == 0.0, 0.0, x / jnp.where(by == 0.0, 1.0, by))


def _nan_where(is_broken: Bool[Array, "*shape"], x: Float32[Array, "*shape"]) -> Array:
    return jnp.where(is_broken, jnp.nan, x)


def _bytes(codes: Float32[Array, ...]) -> Array:
    return jnp.nan_to_num(codes).astype(jnp.uint8)
