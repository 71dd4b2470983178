"""Folders with float8_e4m3fn weights: `quant_method` "fp8", and what compressed-tensors shares.

A module has `weight` float8 [out, in]. With blocks, as in DeepSeek-V3's folders, its scales are
`weight_scale_inv` float32 [out / block, in / block]; otherwise `weight_scale` for all numbers, or
for each output. Numbers are multiplied with their scale, whatever the name says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeGuard, final

import numpy as np
from jaxtyping import Float

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.quantised_folders.matrix import Found, Matrix
from jaxserve.models.source import WeightSource

Block = tuple[int, int]
# Scales of activations, which products do not use.
SPARE = ("input_scale", "input_zero_point", "input_global_scale", "activation_scale")


@final
@dataclass(frozen=True, kw_only=True)
class Float8:
    """See `Method`.

    Attributes:
      block: outputs and inputs that share a scale; None for scales of outputs, or one for all.
    """

    block: Block | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Read `quantization_config`.

        Raises:
          UnsupportedModelError: another format of numbers, or blocks that are not two sizes.
        """
        block, format = given.get("weight_block_size"), given.get("fmt") or "e4m3"
        if format not in ("e4m3", "float8_e4m3fn") or not (block is None or is_block(block)):
            raise UnsupportedModelError(
                f"quantization_config of 'fp8' has fmt={format!r} and weight_block_size={block!r}; "
                "'e4m3' is read, with blocks such as [128, 128] or without"
            )
        return cls(block=None if block is None else (block[0], block[1]))

    def matrices(self, source: WeightSource, found: Found) -> None:
        """See `Method`."""
        scale = "weight_scale" if self.block is None else "weight_scale_inv"
        found.add_modules(
            scale, lambda module: float8_matrix(source, found, module, scale, self.block)
        )


def is_block(given: Any) -> TypeGuard[list[int]]:
    """Return whether a setting is the two sizes of a block."""
    return (
        isinstance(given, list)
        and len(given) == 2
        and all(isinstance(size, int) and size > 0 for size in given)
    )


def float8_matrix(
    source: WeightSource, found: Found, module: str, scale: str, block: Block | None
) -> Matrix | None:
    """Return a module's weight, or None after a note of what is wrong with it.

    Args:
      scale: the last part of the name of its scales.
    """
    stored = found.sizes(module, "weight")
    if stored is None:
        return None
    num_outputs, num_inputs = stored
    name, shape = f"{module}.{scale}", found.shapes[f"{module}.{scale}"]
    if block is None:
        allowed: tuple[tuple[int, ...], ...] = ((num_outputs, 1), (num_outputs,), (1,), (1, 1), ())
        rows, group = 1, num_inputs
    else:
        rows, group = block
        allowed = ((-(-num_outputs // rows), -(-num_inputs // group)),)
        if found.uneven_groups(module, num_inputs, group, 8):
            return None
    if shape not in allowed:
        found.problems.append(f"tensor {name} has shape {shape}, not one of {allowed}")
        return None
    spare = [f"{module}.{last}" for last in SPARE if f"{module}.{last}" in found.shapes]

    def read_scales() -> Float[np.ndarray, "out groups"]:
        scales = source.read(name)
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
