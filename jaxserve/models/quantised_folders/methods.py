"""The formats of quantised folders by their name in `quantization_config`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxserve.core.errors import CheckpointError, UnsupportedModelError
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

# Files in which AutoGPTQ and AutoAWQ described weights beside config.json, with their formats.
_OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def method_in(folder: Path, config: Mapping[str, Any]) -> Method | None:
    """Return `method_of` a folder, whose writer may have described its weights in another file.

    Raises:
      CheckpointError: that file cannot be read.
    """
    for name, method in _OWN_FILES.items():
        if not config.get("quantization_config") and (folder / name).is_file():
            try:
                given = json.loads((folder / name).read_text(encoding="utf-8"))
                return method_of({"quantization_config": {"quant_method": method, **given}})
            except (OSError, ValueError, TypeError) as error:
                raise CheckpointError(
                    str(folder), [f"{name} cannot be read: {error}"], f"fetch {name} again"
                ) from error
    return method_of(config)


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
