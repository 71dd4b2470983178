"""Sources of adapters: folders that PEFT has written, or a trainer's arrays."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, final

import ml_dtypes  # noqa: F401  # registers bfloat16 with NumPy, which safetensors then uses
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jaxserve.core.errors import InvalidParamsError
from jaxserve.models.hub import HubModel

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MAGNITUDE = ".lora_magnitude_vector"
_MAX_RANK = 2**31 - 1
# Settings of PEFT that may have any value: they describe where or how it was trained, or are read
# here.
_HARMLESS = frozenset(
    (
        *("r", "lora_alpha", "use_rslora", "lora_dropout", "inference_mode", "task_type"),
        *("base_model_name_or_path", "revision", "auto_mapping", "peft_version", "runtime_config"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("fan_in_fan_out", "ensure_weight_tying", "megatron_config", "megatron_core"),
        *("rank_pattern", "alpha_pattern"),
        # Options of an initialisation, of `use_qalora`, and of settings that are themselves
        # refused.
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    )
)
# The other settings must be empty, or have one of these values. Initialisations that are not listed
# may change the base weights, so that the adapter does not fit the original ones, as PiSSA, OLoRA,
# CorDA, LoftQ and LoRA-GA do. PEFT writes `true` where it has converted such an adapter.
_SERVED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}


# Errors of folders that PEFT did not write.
_UNREADABLE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, re.error, SafetensorError),
    *(OverflowError, RecursionError),
)


@final
class AdapterSource:
    """A `WeightSource` with the matrices A and B of one adapter.

    Args:
      arrays: by PEFT's name, such as `model.layers.0.self_attn.q_proj.lora_A.weight` [rank, in] and
        `...lora_B.weight` [out, rank]. The prefix `base_model.model.` and the end `.weight` may be
        missing.
      scale: factor of B @ A.
      where: names the source in error messages.
      merges: whether the adapter is to be merged into the weights, as DoRA must be. Then the
        vectors `...lora_magnitude_vector` [out] are not in `shapes`.

    Attributes:
      magnitudes: of a DoRA that is to be merged, by module; else empty.

    Raises:
      InvalidParamsError: the scale is not a finite number.
    """

    def __init__(
        self,
        arrays: Mapping[str, Any],
        scale: float,
        where: str = "the arrays",
        *,
        merges: bool = False,
    ):
        is_number = isinstance(scale, Real) and not isinstance(scale, bool)
        if not is_number or not math.isfinite(scale):
            raise InvalidParamsError(f"scale={scale!r} of {where} is not allowed; pass a number")
        self.where = where
        self.scale = float(scale)
        self._arrays = {_name(name): np.asarray(array) for name, array in arrays.items()}
        if len(self._arrays) < len(arrays):
            names = Counter(map(_name, arrays))
            twice = next(name for name, count in names.items() if count > 1)
            raise InvalidParamsError(f"{where} have {twice!r} twice; pass each matrix once")
        vectors = [name for name in self._arrays if merges and name.endswith(_MAGNITUDE)]
        self.magnitudes = {
            name.removesuffix(_MAGNITUDE): self._arrays.pop(name) for name in vectors
        }

    @classmethod
    def of(
        cls, given: str | Path | Mapping[str, Any], scale: float | None, *, merges: bool = False
    ) -> AdapterSource:
        """Return the source for a folder, a name of the Hub, or arrays with their scale.

        Raises:
          InvalidParamsError: the folder has no usable adapter, or arrays lack their scale, or a
            folder, which has its own, is given one.
          UnknownModelError, DownloadError: a name of the Hub cannot be fetched.
        """
        if isinstance(given, Mapping):
            if scale is None:
                raise InvalidParamsError(
                    "arrays of an adapter need scale=, the factor of B @ A; pass lora_alpha / rank"
                )
            return cls(given, scale, merges=merges)
        if scale is not None:
            raise InvalidParamsError(
                f"scale={scale!r} was given for a folder, whose {_CONFIG} has the scale; omit it"
            )
        hub = None if Path(given).exists() else HubModel.of(str(given))
        return cls._read(Path(given) if hub is None else hub.fetch(), merges=merges)

    @classmethod
    def _read(cls, folder: Path, *, merges: bool) -> AdapterSource:
        try:
            config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
            rank, alpha = int(config["r"]), float(config["lora_alpha"])
            ranks = {re.compile(k): int(v) for k, v in _pattern(config, "rank_pattern")}
            alphas = {re.compile(k): float(v) for k, v in _pattern(config, "alpha_pattern")}
            arrays = load_file(folder / _WEIGHTS)
        except _UNREADABLE as error:
            raise InvalidParamsError(
                f"{folder} is not an adapter of PEFT ({type(error).__name__}: {error}); pass a "
                f"folder with {_CONFIG} and {_WEIGHTS}"
            ) from error
        allowed = {**_SERVED, "use_dora": (True,) if merges else ()}
        others = {
            name: value
            for name, value in config.items()
            if value and name not in _HARMLESS and value not in allowed.get(name, ())
        }
        if not all(1 <= each <= _MAX_RANK for each in (rank, *ranks.values())):
            others |= {"r": rank, "rank_pattern": config.get("rank_pattern")}
        if not all(map(math.isfinite, (alpha, *alphas.values()))):
            others |= {"lora_alpha": alpha, "alpha_pattern": config.get("alpha_pattern")}
        if others:
            raise InvalidParamsError(
                f"the adapter in {folder} has {others}, which is not served; pass a "
                "LoRA without these settings, or merge it into the weights: a DoRA with "
                "jaxserve.merge_adapter, others with PEFT (docs/adapters.md)"
            )
        for name, array in arrays.items():
            module, is_a, _ = name.removeprefix(_PREFIX).partition(".lora_A")
            wanted = _matching(ranks, module, rank)
            if is_a and array.ndim == 2 and array.shape[0] != wanted:
                raise InvalidParamsError(
                    f"the adapter in {folder} has {name} of rank {array.shape[0]}, and r and "
                    f"rank_pattern in {_CONFIG}, whose first match counts, say {wanted}; PEFT "
                    "refuses it, too: write patterns that match one module each"
                )
        root = math.sqrt if config.get("use_rslora") else float
        scale = alpha / root(rank)
        if ranks or alphas:  # then B is multiplied by its module's own factor
            scale = 1.0
            for name in [name for name in arrays if ".lora_B" in name]:
                module = name.removeprefix(_PREFIX).partition(".lora_B")[0]
                own = _matching(alphas, module, alpha) / root(_matching(ranks, module, rank))
                arrays[name] = own * arrays[name].astype(np.float32)
        source = cls(arrays, scale, str(folder), merges=merges)
        if merges and bool(config.get("use_dora")) != bool(source.magnitudes):
            raise InvalidParamsError(
                f"the adapter in {folder} has use_dora={config.get('use_dora')} and "
                f"{len(source.magnitudes)} vectors lora_magnitude_vector; pass the folder as PEFT "
                "has written it"
            )
        return source

    @property
    def rank(self) -> int:
        shapes = self.shapes().items()
        return max((shape[0] for name, shape in shapes if ".lora_A." in name), default=0)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: array.shape for name, array in self._arrays.items()}

    def dtypes(self) -> Mapping[str, str]:
        return {name: array.dtype.name for name, array in self._arrays.items()}

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        return self._arrays[name] if index is None else self._arrays[name][index]


def _pattern(config: Mapping[str, Any], name: str) -> Iterable[tuple[str, Any]]:
    """Return pairs of a pattern for the ends of module names and their value."""
    return ((rf"(.*\.)?({key})$", value) for key, value in (config.get(name) or {}).items())


def _matching(values: Mapping[re.Pattern[str], float], module: str, otherwise: float) -> float:
    """Return the value of the first pattern that matches a module, as PEFT does."""
    found = (value for pattern, value in values.items() if pattern.match(module))
    return next(found, otherwise)


def _name(given: str) -> str:
    """Return PEFT's name of a matrix, without prefix and with its end.

    A vector of magnitudes has no end, as in PEFT's files.
    """
    name = given.removeprefix(_PREFIX)
    if name.endswith(f"{_MAGNITUDE}.weight"):
        return name.removesuffix(".weight")
    return f"{name}.weight" if name.endswith((".lora_A", ".lora_B")) else name
