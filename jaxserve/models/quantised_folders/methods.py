"""The formats of quantised folders by their name in `quantization_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.quantised_folders.awq import AWQ
from jaxserve.models.quantised_folders.compressed_tensors import CompressedTensors
from jaxserve.models.quantised_folders.float8 import Float8
from jaxserve.models.quantised_folders.gptq import GPTQ
from jaxserve.models.quantised_folders.matrix import Method

METHODS: Mapping[str, Callable[[Mapping[str, Any]], Method]] = MappingProxyType(
    {
        "gptq": GPTQ.of,
        "awq": AWQ.of,
        "compressed-tensors": CompressedTensors.of,
        "fp8": Float8.of,
    }
)


def method_of(config: Mapping[str, Any]) -> Method | None:
    """Return the format of a folder's weights, from config.json; None for dense weights.

    Raises:
      UnsupportedModelError: the format is not read.
    """
    given = config.get("quantization_config")
    if not given:
        return None
    name = given.get("quant_method")
    if name not in METHODS:
        raise UnsupportedModelError(
            f"quantization_config has quant_method={name!r}; read are 'gptq' (4 and 8 bits), 'awq' "
            "(4 bits, version 'gemm'), 'compressed-tensors' ('pack-quantized', 'int-quantized' and "
            "'float-quantized') and 'fp8' (e4m3). Use a checkpoint in one of these, or one in 16 "
            "bits with quantize='int4' or 'int8'"
        )
    return METHODS[name](given)
