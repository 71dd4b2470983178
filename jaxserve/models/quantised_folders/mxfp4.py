"""gpt-oss's folders: `quant_method` "mxfp4", experts in four bits with a scale for 32 inputs.

A weight `NAME` of all experts of a layer has `NAME_blocks` uint8 [experts, out, groups, 16], two
e2m1 numbers in a byte, the first in the low bits, and `NAME_scales` uint8 [experts, out, groups],
exponents of two plus 127 (Rouhani et al., arXiv:2310.10537, section 4). Twice an e2m1 number is a
whole one of at most 12, so codes of eight bits hold all numbers exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
from jaxtyping import Float32, UInt8

from jaxserve.models.quantised_folders.matrix import Found, Matrix
from jaxserve.models.weights import WeightSource

_GROUP, _MIDDLE = 32, 128
# Twice the numbers of the sixteen codes, around the middle.
_CODES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]) + _MIDDLE
# The codes of the two numbers in each byte.
_PAIRS = np.stack([np.tile(_CODES, 16), np.repeat(_CODES, 16)], axis=1).astype(np.uint8)


@final
@dataclass(frozen=True)
class MXFP4:
    """The `Method` of these folders."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        return cls()

    def matrices(self, source: WeightSource, found: Found) -> None:
        for blocks in [name for name in found.shapes if name.endswith("_blocks")]:
            name = blocks.removesuffix("_blocks")
            scales = f"{name}_scales"
            *lead, num_groups, size = shape = found.shapes[blocks]
            if size != _GROUP // 2 or len(shape) != 4:
                found.problems.append(f"tensor {blocks} has shape {shape}, not four sizes with 16")
            elif found.shapes.get(scales) != shape[:-1]:
                found.problems.append(
                    f"tensor {scales} has shape {found.shapes.get(scales)}, not {shape[:-1]}"
                )
            else:
                found.matrices[name] = _matrix(source, name, (*lead, num_groups * _GROUP))


def _matrix(source: WeightSource, name: str, shape: tuple[int, ...]) -> Matrix:
    def codes() -> UInt8[np.ndarray, "*experts out in"]:
        return _PAIRS[source.read(f"{name}_blocks")].reshape(shape)

    def scales() -> Float32[np.ndarray, "*experts out groups"]:
        exponents = source.read(f"{name}_scales").astype(np.int32) - 127
        return np.ldexp(np.float32(0.5), exponents)

    return Matrix(
        shape=shape,
        bits=8,
        group=_GROUP,
        tensors=(f"{name}_blocks", f"{name}_scales"),
        codes=codes,
        scales=scales,
    )
