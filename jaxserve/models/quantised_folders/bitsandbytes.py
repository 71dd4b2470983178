"""bitsandbytes folders in four bits (NF4 and FP4; QLoRA, arXiv:2305.14314, section 3), and eight.

A module in four bits has `weight` uint8 [numbers / 2, 1], the first number of a byte in the high
bits. Next to it are `weight.quant_map` float32 [16], the numbers of the codes, `weight.absmax`
[blocks], the scale of each block of consecutive numbers, and
`weight.quant_state.bitsandbytes__nf4`, JSON in bytes. With double quantisation `absmax` are bytes:
codes of `weight.nested_quant_map` float32 [256], times `weight.nested_absmax` of their block, plus
an offset. Numbers are not whole multiples of a unit, so weights are decoded when they are read.
Source: bitsandbytes 0.50.2, functional.py.

A module in eight bits (LLM.int8(), arXiv:2208.07339) has `weight` int8 [out, in], `SCB` float32
[out], 127 times the scale of each output, and `weight_format`, 0 for rows in order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
from jaxtyping import Float32

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.quantised_folders.matrix import Decoded, Found, Matrix, reader
from jaxserve.models.weights import WeightSource

_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
_NESTED = ("nested_quant_map", "nested_absmax")


@final
@dataclass(frozen=True)
class BitsAndBytes:
    """The `Method` of these folders."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Read `quantization_config`; raise UnsupportedModelError for another storage."""
        storage = given.get("bnb_4bit_quant_storage") or "uint8"
        is_four = bool(given.get("load_in_4bit"))
        if not (is_four or given.get("load_in_8bit")) or is_four and storage != "uint8":
            raise UnsupportedModelError(
                f"quantization_config of 'bitsandbytes' has load_in_4bit="
                f"{given.get('load_in_4bit')!r}, load_in_8bit={given.get('load_in_8bit')!r} and "
                f"bnb_4bit_quant_storage={storage!r}; eight bits, and four bits stored as uint8, "
                "are read. Use a folder in 16 bits with quantize='int8'"
            )
        return cls()

    def matrices(self, source: WeightSource, found: Found) -> None:
        for name in found.shapes:
            weight, _, last = name.partition(".quant_state.")
            if f"quant_state.{last}" in _STATES:
                self._add(source, found, weight, name)
        found.add_modules("SCB", lambda module: _eight_bits(source, found, module))

    def _add(self, source: WeightSource, found: Found, weight: str, state_name: str) -> None:
        read = reader(source, weight)
        state = json.loads(source.read(state_name).tobytes())
        is_nested = "nested_blocksize" in state
        parts = ("absmax", "quant_map", *(_NESTED if is_nested else ()))
        tensors = [weight, state_name, *(f"{weight}.{part}" for part in parts)]
        missing = [name for name in tensors if name not in found.shapes]
        shape = tuple(state["shape"])
        count = int(np.prod(shape))
        if missing or found.shapes[weight] != (-(-count // 2), 1):
            found.problems.append(
                f"{weight} of {shape} is stored in {found.shapes.get(weight)} bytes, and lacks "
                f"{missing}"
            )
            return

        def scales() -> Float32[np.ndarray, " blocks"]:
            stored = read("absmax")
            if not is_nested:
                return stored.astype(np.float32)
            whole = np.repeat(read("nested_absmax"), state["nested_blocksize"])[: stored.size]
            return read("nested_quant_map")[stored] * whole + np.float32(state["nested_offset"])

        def numbers() -> Float32[np.ndarray, "*shape"]:
            octets = source.read(weight).reshape(-1)
            codes = np.stack([octets >> 4, octets & 15], axis=1).reshape(-1)[:count]
            each = np.repeat(scales(), state["blocksize"])[:count]
            return (read("quant_map")[codes] * each).reshape(shape)

        found.matrices[weight] = Decoded(shape=shape, tensors=tuple(tensors), numbers=numbers)


def _eight_bits(source: WeightSource, found: Found, module: str) -> Matrix | None:
    """Return a module's weight; None after adding its problem to `found`."""
    stored = found.sizes(module, "weight")
    if stored is None or found.wrong_shapes(module, {"SCB": (stored[0],)}):
        return None
    name, layout = f"{module}.weight", f"{module}.weight_format"
    kind = source.dtypes()[name]
    is_plain = layout not in found.shapes or not source.read(layout).any()
    if kind != "I8" or not is_plain:
        found.problems.append(
            f"tensor {name} is in {kind}, and weight_format says {'' if is_plain else 'not '}that "
            "its rows are in order; I8 in order is read"
        )
        return None
    read = reader(source, module)
    return Matrix(
        shape=stored,
        bits=8,
        group=stored[1],
        tensors=(name, f"{module}.SCB", *([layout] if layout in found.shapes else ())),
        codes=lambda: (read("weight").astype(np.int16) + 128).astype(np.uint8),
        scales=lambda: read("SCB").astype(np.float32)[:, None] / np.float32(127),
    )
