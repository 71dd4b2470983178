"""compressed-tensors folders, as llm-compressor writes them: packed integers, int8, and float8.

Format "pack-quantized": a module has `weight_packed` int32 [out, in * bits / 32], `weight_scale`
[out, groups], `weight_shape` [2], and where asymmetric `weight_zero_point`, packed along `out`.
With activation order, `weight_g_idx` int32 [in]. Format "int-quantized": `weight` int8 [out, in]
and a zero point int8 [out, groups]. Numbers are signed; packed ones have 2 ** (bits - 1) added.
Format "float-quantized": see `float8`; "nvfp4-pack-quantized" and "mxfp4-pack-quantized": see
`float4`.
Source: compressed_tensors/compressors/quantized_compressors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
from jaxtyping import Int, Int16, Int32

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.quantised_folders.float4 import packed_matrix
from jaxserve.models.quantised_folders.float8 import SPARE, Block, float8_matrix, is_block
from jaxserve.models.quantised_folders.matrix import Found, Matrix, reader, unpacked, whole_number
from jaxserve.models.weights import WeightSource

# The types and bits of weights by format.
_TYPES = {
    "pack-quantized": ("int", (4, 8)),
    "int-quantized": ("int", (8,)),
    "float-quantized": ("float", (8,)),
    "nvfp4-pack-quantized": ("float", (4,)),
    "mxfp4-pack-quantized": ("float", (4,)),
}
# Groups and strategies of the last two.
_FLOAT4 = {"nvfp4-pack-quantized": (16, "tensor_group"), "mxfp4-pack-quantized": (32, "group")}


@final
@dataclass(frozen=True, order=True)
class _Scheme:
    """The weights of a group of modules."""

    bits: int
    group: int  # number of inputs that share a scale; -1 for one scale an output, or one in all
    is_packed: bool = False  # whether several numbers are in a word of 32 bits
    is_float: bool = False
    block: Block = (0, 0)  # see `Float8`; (0, 0) for no blocks


@final
@dataclass(frozen=True, kw_only=True)
class CompressedTensors:
    """The `Method` of compressed-tensors; the shapes of a module's tensors select its scheme."""

    schemes: frozenset[_Scheme]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Read `quantization_config`; raise UnsupportedModelError for an unknown scheme."""
        sparsity = (given.get("sparsity_config") or {}).get("format") or "dense"
        if sparsity != "dense":
            raise UnsupportedModelError(
                f"quantization_config has a sparsity_config of format {sparsity!r}; only 'dense' "
                "is read, so save the checkpoint without sparse compression"
            )
        transforms = (given.get("transform_config") or {}).get("config_groups")
        if transforms:
            raise UnsupportedModelError(
                f"quantization_config has a transform_config with {sorted(transforms)}, rotations "
                "of activations (QuIP, SpinQuant) that are not applied here; use a checkpoint "
                "without transforms"
            )
        groups = given.get("config_groups") or {}
        if not isinstance(groups, Mapping) or not all(
            isinstance(each, Mapping) for each in groups.values()
        ):
            raise UnsupportedModelError(
                f"quantization_config of 'compressed-tensors' has config_groups={groups!r}; read "
                "are settings by the name of their group, as llm-compressor writes them"
            )
        schemes = frozenset(_scheme(each, given.get("format")) for each in groups.values())
        if any(each.is_float for each in schemes) and len(schemes) > 1:
            raise UnsupportedModelError(
                "quantization_config of 'compressed-tensors' has several config_groups, one of "
                "them of floats; such a folder may have no others"
            )
        return cls(schemes=schemes)

    def matrices(self, source: WeightSource, found: Found) -> None:
        packed = set(found.modules("weight_packed"))
        found.add_modules(
            "weight_scale", lambda module: self._matrix(source, found, module, module in packed)
        )
        for module in packed - set(found.modules("weight_scale")):
            found.problems.append(f"missing tensor {module}.weight_scale")

    def _matrix(
        self, source: WeightSource, found: Found, module: str, is_packed: bool
    ) -> Matrix | None:
        floats = [each for each in self.schemes if each.is_float]
        if floats and floats[0].bits == 4:
            return packed_matrix(source, found, module, floats[0].group)
        if floats:
            block = floats[0].block if any(floats[0].block) else None
            return float8_matrix(source, found, module, "weight_scale", block)
        read = reader(source, module)
        last = "weight_packed" if is_packed else "weight"
        stored = found.sizes(module, last)
        if stored is None:
            return None
        num_outputs, num_inputs = stored
        if is_packed:
            if found.wrong_shapes(module, {"weight_shape": (2,)}):
                return None
            num_outputs, num_inputs = (int(size) for size in read("weight_shape"))
        scales = found.shapes[f"{module}.weight_scale"]
        fitting = [
            each
            for each in sorted(self.schemes)
            if each.is_packed == is_packed
            if (num_outputs, -(-num_inputs * each.bits // 32)) == stored or not is_packed
            if scales == (num_outputs, 1 if each.group == -1 else -(-num_inputs // each.group))
        ]
        if not fitting:
            found.problems.append(
                f"{module} of {num_inputs} inputs and {num_outputs} outputs has {last} {stored} "
                f"and weight_scale {scales}, which fit none of the config_groups "
                f"{[(each.bits, each.group) for each in sorted(self.schemes)]} (bits, group_size)"
            )
            return None
        bits = fitting[0].bits
        group = num_inputs if fitting[0].group == -1 else fitting[0].group
        if group != num_inputs and found.uneven_groups(module, num_inputs, group, bits):
            return None
        num_groups = num_inputs // group
        middle = 1 << (bits - 1)
        tensors = [f"{module}.{name}" for name in (last, "weight_scale")]
        tensors += [f"{module}.weight_shape"] if is_packed else []
        zeros, groups = f"{module}.weight_zero_point", f"{module}.weight_g_idx"
        packed_zeros = (-(-num_outputs * bits // 32), num_groups)
        if found.shapes.get(zeros, packed_zeros) not in (packed_zeros, (num_outputs, num_groups)):
            found.problems.append(
                f"tensor {zeros} has shape {found.shapes[zeros]}, not {packed_zeros} (packed) or "
                f"{(num_outputs, num_groups)}"
            )
            return None
        # Scales of activations are not used: products round activations by groups or not at all.
        others = (zeros, groups, *(f"{module}.{name}" for name in SPARE))
        tensors += [name for name in others if name in found.shapes]

        def read_codes() -> np.ndarray:
            if is_packed:
                return unpacked(read("weight_packed"), bits)[:, :num_inputs]
            return _unsigned(read("weight"), middle).astype(np.uint8)

        def read_zeros() -> Int16[np.ndarray, "out groups"]:
            given = read("weight_zero_point")
            if given.shape == packed_zeros and given.dtype == np.int32:  # along the outputs
                return unpacked(given.T, bits)[:, :num_outputs].T.astype(np.int16)
            return _unsigned(given, middle).reshape(num_outputs, num_groups)

        def read_groups() -> Int32[np.ndarray, " in"]:
            given = read("weight_g_idx")
            # It is -1 where inputs are in order.
            return given if (given >= 0).any() else np.arange(num_inputs, dtype=np.int32) // group

        return Matrix(
            shape=(num_outputs, num_inputs),
            bits=bits,
            group=group,
            tensors=tuple(tensors),
            codes=read_codes,
            scales=lambda: read("weight_scale"),
            zeros=read_zeros if zeros in found.shapes else None,
            groups=read_groups if groups in found.shapes else None,
        )


def _scheme(given: Mapping[str, Any], format: Any) -> _Scheme:
    weights = given.get("weights") or {}
    format = given.get("format") or format
    bits: Any = weights.get("num_bits")
    kind, strategy = weights.get("type"), weights.get("strategy")
    group = whole_number(weights, "group_size")
    if strategy is None:
        strategy = "channel" if group in (None, -1) else "group"
    block = weights.get("block_structure")
    wanted, allowed = _TYPES.get(str(format), (None, ()))
    is_float = wanted == "float"
    if (bits, kind, group, strategy) == (4, "float", *_FLOAT4.get(str(format), ())):
        return _Scheme(bits, group or 0, is_packed=True, is_float=True)
    strategies = ("channel", "tensor", "block") if is_float else ("channel", "group")
    is_sized = {"group": group is not None and group > 0, "block": is_block(block)}
    if (
        kind != wanted
        or bits not in allowed
        or strategy not in strategies
        or not is_sized.get(strategy, True)
    ):
        raise UnsupportedModelError(
            f"quantization_config of 'compressed-tensors' has format={format!r} with weights of "
            f"num_bits={bits!r}, type={kind!r}, strategy={strategy!r} and block_structure="
            f"{block!r}; read are "
            "'pack-quantized' (int, 4 and 8 bits) and 'int-quantized' (int, 8 bits) with the "
            "strategies 'group' and 'channel', 'float-quantized' (float, 8 bits) with 'channel', "
            "'tensor' and 'block', 'nvfp4-pack-quantized' (float, 4 bits) with 'tensor_group' of "
            "16, and 'mxfp4-pack-quantized' (float, 4 bits) with 'group' of 32"
        )
    if is_float:
        sizes = (block[0], block[1]) if strategy == "block" and is_block(block) else (0, 0)
        return _Scheme(bits, -1, is_float=True, block=sizes)
    group = -1 if strategy == "channel" or group is None else group
    return _Scheme(bits, group, is_packed=format == "pack-quantized")


def _unsigned(
    signed: Int[np.ndarray, "out numbers"], middle: int
) -> Int16[np.ndarray, "out numbers"]:
    return signed.astype(np.int16) + np.int16(middle)
