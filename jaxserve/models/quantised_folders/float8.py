"""Folders with float8_e4m3fn weights: `quant_method` "fp8", and its code for compressed-tensors.

A module has `weight` float8 [out, in]. With blocks, as in DeepSeek-V3's folders, its scales are
`weight_scale_inv` float32 [out / block, in / block], rounded up; otherwise `weight_scale` or
`weight_scale_inv` for all numbers, or for each output. Numbers are multiplied by their scale,
regardless of the name, except if `weight_scale_semantics` is "inverse", as GPTQModel 7.7.0
writes it: then they are divided by it. Source: gptqmodel/nn_modules/qlinear/fp8.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeGuard, final

import numpy as np
from jaxtyping import Float

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.quantised_folders.matrix import Found, Matrix
from jaxserve.models.weights import WeightSource

Block = tuple[int, int]
# Scales of activations, which products do not use.
SPARE = ("input_scale", "input_zero_point", "input_global_scale", "activation_scale")


@final
@dataclass(frozen=True, kw_only=True)
class Float8:
    """The `Method` of float8 folders."""

    # Outputs and inputs that share a scale; None for scales of outputs, or one for all.
    block: Block | None
    divides: bool = False  # whether numbers are divided by their scale

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Read `quantization_config`; raise UnsupportedModelError for an unknown format."""
        block = given.get("weight_block_size")
        format = given.get("fmt") or given.get("format") or "e4m3"
        semantics = given.get("weight_scale_semantics")
        if semantics not in (None, "inverse"):
            raise UnsupportedModelError(
                f"quantization_config of 'fp8' has weight_scale_semantics={semantics!r}; 'inverse' "
                "is read, or none"
            )
        if format not in ("e4m3", "float8_e4m3fn") or not (block is None or is_block(block)):
            raise UnsupportedModelError(
                f"quantization_config of 'fp8' has fmt={format!r} and weight_block_size={block!r}; "
                "'e4m3' is read, with blocks such as [128, 128] or without"
            )
        return cls(
            block=None if block is None else (block[0], block[1]), divides=semantics == "inverse"
        )

    def matrices(self, source: WeightSource, found: Found) -> None:
        for scale in ("weight_scale_inv",) if self.block else ("weight_scale", "weight_scale_inv"):
            found.add_modules(
                scale,
                lambda module, scale=scale: float8_matrix(
                    source, found, module, scale, self.block, divides=self.divides
                ),
            )


def is_block(given: Any) -> TypeGuard[list[int]]:
    """Return whether a setting is the two sizes of a block."""
    return (
        isinstance(given, list)
        and len(given) == 2
        and all(isinstance(size, int) and size > 0 for size in given)
    )


def float8_matrix(
    source: WeightSource,
    found: Found,
    module: str,
    scale: str,
    block: Block | None,
    *,
    divides: bool = False,
) -> Matrix | None:
    """Return a module's weight; None after adding its problem to `found`.

    `scale` is the last part of the name of its scales; numbers are divided by them if `divides`.
    """
    stored = found.sizes(module, "weight")
    if stored is None:
        return None
    num_outputs, num_inputs = stored
    kind = source.dtypes()[f"{module}.weight"]
    if kind != "F8_E4M3":
        found.problems.append(f"tensor {module}.weight is in {kind}, not in F8_E4M3")
        return None
    name, shape = f"{module}.{scale}", found.shapes[f"{module}.{scale}"]
    if block is None:
        allowed: tuple[tuple[int, ...], ...] = ((num_outputs, 1), (num_outputs,), (1,), (1, 1), ())
        rows, group = 1, num_inputs
    else:
        rows, group = block
        allowed = ((-(-num_outputs // rows), -(-num_inputs // group)),)
    if shape not in allowed:
        found.problems.append(f"tensor {name} has shape {shape}, not one of {allowed}")
        return None
    spare = [f"{module}.{last}" for last in SPARE if f"{module}.{last}" in found.shapes]

    def read_scales() -> Float[np.ndarray, "out groups"]:
        scales = source.read(name)
        if scales.dtype.itemsize == 1:  # float8_e8m0, a power of two
            scales = scales.astype(np.float32)
        if divides:
            scales = 1 / scales.astype(np.float32)
        if block is None:
            return np.broadcast_to(scales.reshape(-1, 1), (num_outputs, 1))
        return np.repeat(scales, rows, axis=0)[:num_outputs]

    return Matrix(
        shape=(num_outputs, num_inputs),
        bits=8,
        group=group,
        tensors=(f"{module}.weight", name, *spare),
        codes=lambda: source.read(f"{module}.weight").view(np.uint8),
        scales=read_scales,
        is_float=True,
    )
