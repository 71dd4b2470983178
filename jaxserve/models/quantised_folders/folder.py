"""A folder with quantised weights as a source of numbers and codes, and the table of formats."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import numpy as np

from jaxserve.core.errors import CheckpointError, UnsupportedModelError
from jaxserve.models.quantised_folders.bitsandbytes import BitsAndBytes
from jaxserve.models.quantised_folders.compressed_tensors import CompressedTensors
from jaxserve.models.quantised_folders.float4 import MXFP4, ModelOpt
from jaxserve.models.quantised_folders.float8 import Float8
from jaxserve.models.quantised_folders.gptq import AWQ, GPTQ
from jaxserve.models.quantised_folders.matrix import Found, Matrix, Method
from jaxserve.models.weights import WeightSource

_log = logging.getLogger(__name__)

# Names in safetensors of types whose numbers mean nothing without scales.
_SCALED = ("I8", "U8", "F8_E4M3", "F8_E5M2")
# Last parts of the names of the scales of a KV cache in few bits.
_KV_SCALES = ("k_scale", "v_scale")

_REMEDY = (
    "quantization_config in config.json and the weights do not belong together, or the folder is "
    "incomplete; fetch both again from the same place"
)


@final
class QuantisedFolder:
    """A `WeightSource` in which a quantised weight is one tensor under its usual name.

    `source` has the tensors as they are stored.

    Raises:
      CheckpointError: tensors that are missing, misshapen or of another number of bits, groups
        that do not divide, or weights without scales; all of them together.
    """

    def __init__(self, source: WeightSource, method: Method):
        self.where = source.where
        self._source = source
        found = Found(source.shapes())
        method.matrices(source, found)
        problems = found.problems or list(_without_scales(source, found))
        if problems:
            raise CheckpointError(self.where, problems, _REMEDY)
        self._matrices = found.matrices
        self._kv_scales = {n for n in found.shapes if n.rpartition(".")[2] in _KV_SCALES}
        if self._kv_scales:
            _log.warning(
                "%s: %d scales of a KV cache (k_scale, v_scale) are not read; kv_dtype alone says "
                "in what type keys and values are stored",
                self.where,
                len(self._kv_scales),
            )

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        parts = {name for matrix in self._matrices.values() for name in matrix.tensors}
        parts |= self._kv_scales
        others = {n: shape for n, shape in self._source.shapes().items() if n not in parts}
        return others | {name: matrix.shape for name, matrix in self._matrices.items()}

    def dtypes(self) -> Mapping[str, str]:
        stored = self._source.dtypes()
        return {name: "F32" if name in self._matrices else stored[name] for name in self._shapes}

    def matrix(self, name: str) -> Matrix | None:
        """Return a quantised weight; None for a dense tensor, and one that is decoded."""
        found = self._matrices.get(name)
        return found if isinstance(found, Matrix) else None

    def empty_biases(self) -> frozenset[str]:
        """Return the biases of quantised weights that are all zeros.

        Some writers add one to each quantised weight, even if the model has no biases.
        """
        biases = (name.removesuffix("weight") + "bias" for name in self._matrices)
        return frozenset(
            name for name in biases if name in self._shapes and not self.read(name).any()
        )

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Read a tensor. A quantised weight is float32, decoded as a whole."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._source.read(name, index)
        numbers = matrix.numbers()
        return numbers if index is None else numbers[index]


def _without_scales(source: WeightSource, found: Found) -> Iterator[str]:
    """Yield the problems of weights in few bits that are not part of a quantised weight."""
    parts = {name for matrix in found.matrices.values() for name in matrix.tensors}
    for name, dtype in source.dtypes().items():
        if name.endswith(".weight") and dtype in _SCALED and name not in parts:
            yield f"tensor {name} is in {dtype}, and the folder has no scales of it"


METHODS: Mapping[str, Callable[[Mapping[str, Any]], Method]] = MappingProxyType(
    {
        "gptq": GPTQ.of,
        "awq": AWQ.of,
        "compressed-tensors": CompressedTensors.of,
        "fp8": Float8.of,
        "mxfp4": MXFP4.of,
        "modelopt": ModelOpt.of,
        "bitsandbytes": BitsAndBytes.of,
    }
)

# Files in which writers described weights outside config.json, with their formats.
_OWN_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}


def method_in(folder: Path, config: Mapping[str, Any]) -> Method | None:
    """Return `method_of` a folder, whose writer may have described its weights in another file."""
    for name, method in _OWN_FILES.items():
        if not config.get("quantization_config") and (folder / name).is_file():
            try:
                given = json.loads((folder / name).read_text(encoding="utf-8"))
                given = given.get("quantization", given)  # ModelOpt names its version beside it
                return method_of({"quantization_config": {"quant_method": method, **given}})
            except (OSError, ValueError, TypeError) as error:
                raise CheckpointError(
                    str(folder), [f"{name} cannot be read: {error}"], f"fetch {name} again"
                ) from error
    return method_of(config)


def method_of(config: Mapping[str, Any]) -> Method | None:
    """Return a folder's format; None for dense weights. Raise UnsupportedModelError if unknown."""
    given = config.get("quantization_config")
    if not given:
        return None
    name = given.get("quant_method")
    if name not in METHODS:
        raise UnsupportedModelError(
            f"quantization_config has quant_method={name!r}; read are 'gptq' (4 and 8 bits), 'awq' "
            "(4 bits, version 'gemm'), 'compressed-tensors' ('pack-quantized', 'int-quantized' and "
            "'float-quantized', 'nvfp4-pack-quantized' and 'mxfp4-pack-quantized'), 'fp8' (e4m3), "
            "'mxfp4' (gpt-oss), 'modelopt' ('NVFP4' and 'FP8') and 'bitsandbytes'. Use a "
            "checkpoint in one of these, or one in 16 bits with quantize='int4' or 'int8'"
        )
    return METHODS[name](given)
