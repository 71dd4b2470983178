"""Adapters as they are given: folders that PEFT has written, or a trainer's arrays."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import ml_dtypes  # noqa: F401  # registers bfloat16 with NumPy, which safetensors then uses
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jaxserve.core.errors import InvalidParamsError

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Settings of PEFT that change what an adapter computes, with the values that are served.
_SERVED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
}
# Initialisations that change the base weights, so that the adapter does not fit the original ones.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq")


@final
class AdapterSource:
    """A `WeightSource` with the matrices A and B of one adapter.

    Args:
      arrays: by PEFT's name, such as `model.layers.0.self_attn.q_proj.lora_A.weight` [rank, in] and
        `...lora_B.weight` [out, rank]. The prefix `base_model.model.` and the end `.weight` may be
        missing.
      scale: factor of B @ A.
      where: names the source in error messages.

    Raises:
      InvalidParamsError: the scale is not a finite number.
    """

    def __init__(self, arrays: Mapping[str, Any], scale: float, where: str = "the arrays"):
        if not math.isfinite(scale):
            raise InvalidParamsError(f"scale={scale!r} of {where} is not allowed; pass a number")
        self.where = where
        self.scale = float(scale)
        self._arrays = {_name(name): np.asarray(array) for name, array in arrays.items()}

    @classmethod
    def of(cls, given: str | Path | Mapping[str, Any], scale: float | None) -> AdapterSource:
        """Return the source for a folder, or for arrays with their scale.

        Raises:
          InvalidParamsError: the folder has no adapter that can be served, or a scale is missing,
            or is given beside a folder, which has its own.
        """
        if isinstance(given, Mapping):
            if scale is None:
                raise InvalidParamsError(
                    "arrays of an adapter need scale=, the factor of B @ A; pass lora_alpha / rank"
                )
            return cls(given, scale)
        if scale is not None:
            raise InvalidParamsError(
                f"scale={scale!r} was given for a folder, whose {_CONFIG} has the scale; omit it"
            )
        return cls._read(Path(given))

    @classmethod
    def _read(cls, folder: Path) -> AdapterSource:
        try:
            config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
            rank, alpha = int(config["r"]), float(config["lora_alpha"])
            arrays = load_file(folder / _WEIGHTS)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise InvalidParamsError(
                f"{folder} is not an adapter of PEFT ({type(error).__name__}: {error}); pass a "
                f"folder with {_CONFIG} and {_WEIGHTS}"
            ) from error
        others = {
            name: config[name]
            for name, served in _SERVED.items()
            if name in config and config[name] not in served
        }
        start = config.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
            others["init_lora_weights"] = start
        if others or rank < 1:
            raise InvalidParamsError(
                f"the adapter in {folder} has {others or {'r': rank}}, which is not served; pass a "
                "LoRA without these settings, or merge it into the weights (docs/adapters.md)"
            )
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        return cls(arrays, scale, str(folder))

    @property
    def rank(self) -> int:
        """The largest rank of its matrices; 0 without any."""
        shapes = self.shapes().items()
        return max((shape[0] for name, shape in shapes if ".lora_A." in name), default=0)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `WeightSource`."""
        return {name: array.shape for name, array in self._arrays.items()}

    def dtypes(self) -> Mapping[str, str]:
        """See `WeightSource`."""
        return {name: array.dtype.name for name, array in self._arrays.items()}

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """See `WeightSource`."""
        return self._arrays[name] if index is None else self._arrays[name][index]


def _name(given: str) -> str:
    """Return PEFT's name of a matrix, without prefix and with its end."""
    name = given.removeprefix(_PREFIX)
    return f"{name}.weight" if name.endswith((".lora_A", ".lora_B")) else name
