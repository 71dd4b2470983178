"""Folders with e2m1 numbers of four bits, two in a byte, the first in the low bits.

gpt-oss's folders (`quant_method` "mxfp4"): a weight `NAME` of all experts of a layer has
`NAME_blocks` uint8 [experts, out, groups, 16] and `NAME_scales` uint8 [experts, out, groups],
exponents of two plus 127 (Rouhani et al., arXiv:2310.10537, section 4).

compressed-tensors 0.20.1: a module has `weight_packed` uint8 [out, in / 2] and `weight_scale`
[out, groups]: of "mxfp4-pack-quantized" such exponents for groups of 32, of "nvfp4-pack-quantized"
float8 for groups of 16, which are divided by `weight_global_scale` float32 [1].

NVIDIA's ModelOpt (`quant_method` "modelopt", "NVFP4"): the same with `weight` for the packed
numbers, and scales that are multiplied by `weight_scale_2` float32, of all.

Twice an e2m1 number is a whole one of at most 12, so codes of eight bits hold all numbers exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
from jaxtyping import Float32, UInt8

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.quantised_folders.float8 import SPARE, Float8
from jaxserve.models.quantised_folders.matrix import Found, Matrix, reader
from jaxserve.models.weights import WeightSource

_GROUP, _NVFP4_GROUP, _MIDDLE = 32, 16, 128
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
        return _halves_of_powers(source.read(f"{name}_scales"))

    return Matrix(
        shape=shape,
        bits=8,
        group=_GROUP,
        tensors=(f"{name}_blocks", f"{name}_scales"),
        codes=codes,
        scales=scales,
    )


@final
@dataclass(frozen=True)
class ModelOpt:
    """The `Method` of ModelOpt's folders in four bits."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ModelOpt | Float8:
        """Read `quantization_config`; its float8 weights are like those of others."""
        algorithm = given.get("quant_algo")
        if algorithm not in ("NVFP4", "FP8"):
            raise UnsupportedModelError(
                f"quantization_config of 'modelopt' has quant_algo={algorithm!r}; 'NVFP4' and "
                "'FP8' are read. Use a folder in 16 bits with quantize='int4' or 'int8'"
            )
        return cls() if algorithm == "NVFP4" else Float8(block=None)

    def matrices(self, source: WeightSource, found: Found) -> None:
        found.add_modules(
            "weight_scale_2",
            lambda module: packed_matrix(source, found, module, _NVFP4_GROUP, is_modelopt=True),
        )


def packed_matrix(
    source: WeightSource, found: Found, module: str, group: int, *, is_modelopt: bool = False
) -> Matrix | None:
    """Return a module's weight of compressed-tensors, or of ModelOpt.

    Groups of 16 are those of NVFP4. None after adding its problem to `found`.
    """
    packed = "weight" if is_modelopt else "weight_packed"
    whole = "weight_scale_2" if is_modelopt else "weight_global_scale"
    stored = found.sizes(module, packed)
    if stored is None:
        return None
    num_outputs, num_inputs = stored[0], 2 * stored[1]
    wanted: dict[str, tuple[int, ...]] = {"weight_scale": (num_outputs, num_inputs // group)}
    if group == _NVFP4_GROUP:
        wanted[whole] = () if found.shapes.get(f"{module}.{whole}") == () else (1,)
    if found.uneven_groups(module, num_inputs, group, 8) or found.wrong_shapes(module, wanted):
        return None
    read = reader(source, module)
    spare = [f"{module}.{last}" for last in SPARE if f"{module}.{last}" in found.shapes]

    def scales() -> Float32[np.ndarray, "out groups"]:
        if group != _NVFP4_GROUP:
            return _halves_of_powers(read("weight_scale"))
        scales = read("weight_scale").astype(np.float32)
        return scales * (read(whole) / 2) if is_modelopt else scales / (2 * read(whole))

    return Matrix(
        shape=(num_outputs, num_inputs),
        bits=8,
        group=group,
        tensors=(f"{module}.{packed}", *(f"{module}.{last}" for last in wanted), *spare),
        codes=lambda: _PAIRS[read(packed)].reshape(num_outputs, num_inputs),
        scales=scales,
    )


def _halves_of_powers(exponents: UInt8[np.ndarray, "*shape"]) -> Float32[np.ndarray, "*shape"]:
    return np.ldexp(np.float32(0.5), exponents.astype(np.int32) - 127)
