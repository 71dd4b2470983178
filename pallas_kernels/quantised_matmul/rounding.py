"""Rounding of weights and of activations to few bits, on their device."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int8

from pallas_kernels.quantised_matmul.packing import PackedMatrix, pack

# What shares a scale when activations are rounded to int8: a group of a row, or a row.
Rounding = Literal["groups", "tokens"]
# Largest magnitudes below which a group of activations counts as zeros.
TINY = 2.0**-100


def quantise(
    matrix: Float[Array, " *lead out in"], *, bits: int, group: int, has_minima: bool = False
) -> PackedMatrix:
    """Return a weight [*lead, out, in] rounded to few bits.

    With 8 bits, a column (an index of `out`) has one scale; activations are rounded in groups of
    `group`. With 4 bits, each group of a column has a scale of its own, and with `has_minima` a
    minimum. A column that has a number that is not finite becomes NaN as a whole.
    """
    matrix = matrix.astype(jnp.float32)
    # Said apart, since a maximum on CPUs can pass over NaN.
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
    # Scales are float16 numbers of the largest of their column, so that any range fits.
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
    """Return a weight [*lead, out, in] rounded to float8_e4m3fn, with one scale for each column.

    The largest magnitude of a column becomes 448, the largest number of the format. A column that
    has a number that is not finite becomes NaN as a whole.
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
    """Return activations in int8, filled up to whole groups, and a scale for each row and group.

    The scale of a group with a number that is not finite is NaN.
    """
    tokens, depth = x.shape
    x = jnp.pad(x.astype(jnp.float32), [(0, 0), (0, -depth % group)])
    grouped = x.reshape(tokens, -1, group)
    # A maximum on CPUs can pass over NaN, but not over infinity.
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
