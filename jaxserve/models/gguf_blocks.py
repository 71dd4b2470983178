"""Blocks of GGUF tensors as codes, scales and minima, exactly as the file has them.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, final

import numpy as np
from jaxtyping import Float, Int, UInt8

Rows = UInt8[np.ndarray, "*rows row_bytes"]
Part = Literal["codes", "scales", "minima"]


@final
@dataclass(frozen=True)
class Blocks:
    """The numbers of some rows: `scales * codes + minima`, group by group.

    Attributes:
      codes: [*rows, length]; signed unless there are minima.
      scales: [*rows, length / group]
      minima: as scales; None for zeros.
    """

    codes: Int[np.ndarray, "*rows length"]
    scales: Float[np.ndarray, "*rows groups"]
    minima: Float[np.ndarray, "*rows groups"] | None


@final
@dataclass(frozen=True)
class BlockType:
    """How a ggml type stores numbers.

    Attributes:
      bits: that a code needs here: 4 or 8.
      group: numbers that share a scale.
      has_minima: whether they share a minimum too.
      has_halves: whether scales and minima are float16 numbers; else they need float32.
    """

    bits: int
    group: int
    has_minima: bool
    has_halves: bool
    decode: Callable[[Rows], Blocks]


def _q8_0(rows: Rows) -> Blocks:
    blocks = rows.reshape(*rows.shape[:-1], -1, 34)
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return Blocks(_joined(codes), _halves(blocks[..., :2]), None)


def _q4_0(rows: Rows) -> Blocks:
    blocks = rows.reshape(*rows.shape[:-1], -1, 18)
    codes = _nibbles(blocks[..., 2:]).astype(np.int8) - np.int8(8)
    return Blocks(_joined(codes), _halves(blocks[..., :2]), None)


def _q4_1(rows: Rows) -> Blocks:
    blocks = rows.reshape(*rows.shape[:-1], -1, 20)
    codes = _nibbles(blocks[..., 4:]).astype(np.int8)
    return Blocks(_joined(codes), _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))


def _q4_k(rows: Rows) -> Blocks:
    blocks = rows.reshape(*rows.shape[:-1], -1, 144)
    whole, least = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=-1)
    codes = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    codes = np.stack([codes & 15, codes >> 4], axis=-2).astype(np.int8)
    scales = whole.astype(np.float32)[..., None] * scales.astype(np.float32)
    minima = -(least.astype(np.float32)[..., None] * minima.astype(np.float32))
    return Blocks(_joined(codes, 3), _joined(scales), _joined(minima))


def _q6_k(rows: Rows) -> Blocks:
    blocks = rows.reshape(*rows.shape[:-1], -1, 210)
    low = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 1, 64)
    low = (low >> np.array([0, 4], np.uint8)[:, None]) & 15  # [..., 2, 2, 64]
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    high = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3  # [..., 2, 4, 32]
    codes = low.reshape(high.shape) | (high << 4)
    codes = codes.astype(np.int8) - np.int8(32)
    steps = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    scales = _halves(blocks[..., 208:]).astype(np.float32)[..., None] * steps
    return Blocks(_joined(codes, 3), _joined(scales), None)


BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        "Q8_0": BlockType(8, 32, False, True, _q8_0),
        "Q4_0": BlockType(4, 32, False, True, _q4_0),
        "Q4_1": BlockType(4, 32, True, True, _q4_1),
        "Q4_K": BlockType(4, 32, True, False, _q4_k),
        "Q6_K": BlockType(8, 16, False, False, _q6_k),
    }
)


@final
@dataclass(frozen=True)
class CommonForm:
    """A form that holds the numbers of several block types exactly, for tensors that are fused.

    Types of 4 bits with and without minima have float32 scales together: the minima of the latter
    are -8 scales, which may be more than float16 holds.

    Attributes: see `BlockType`.
    """

    bits: int
    group: int
    has_minima: bool
    has_halves: bool

    @classmethod
    def of(cls, types: Sequence[BlockType]) -> CommonForm:
        bits, have_minima = max(each.bits for each in types), {each.has_minima for each in types}
        return cls(
            bits,
            min(each.group for each in types),
            any(have_minima),
            all(each.has_halves for each in types) and (bits > 4 or len(have_minima) == 1),
        )

    def part(self, name: Part, kind: BlockType, rows: Rows, unit: int = 1) -> np.ndarray:
        """Return codes (uint8), scales or minima (float32) of a `PackedMatrix` of this form.

        Args:
          unit: numbers for which one scale or minimum is returned; it divides the groups.
        """
        blocks = kind.decode(rows)
        is_shifted = self.bits == 4 and not kind.has_minima  # from -8 .. 7 to 0 .. 15
        if name == "codes":
            shift = 128 if self.bits == 8 else 8 if is_shifted else 0
            return blocks.codes.view(np.uint8) + np.uint8(shift)
        scales = blocks.scales.astype(np.float32)
        if name == "minima":
            if blocks.minima is not None:
                scales = blocks.minima.astype(np.float32)
            else:
                scales = scales * np.float32(-8 if is_shifted else 0)
        return np.repeat(scales, kind.group // unit, axis=-1)


def _halves(pairs: UInt8[np.ndarray, "*blocks 2"]) -> Float[np.ndarray, "*blocks"]:
    return np.ascontiguousarray(pairs).view(np.float16)[..., 0]


def _nibbles(packed: UInt8[np.ndarray, "*blocks n"]) -> UInt8[np.ndarray, "*blocks m"]:
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _joined(x: np.ndarray, axes: int = 1) -> np.ndarray:
    """Return `x` with its blocks, and the `axes` axes after them, in one axis."""
    return x.reshape(*x.shape[: -axes - 1], -1)
