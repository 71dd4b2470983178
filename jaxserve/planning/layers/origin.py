"""The origin of measured layers: model, devices, sizes and versions."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.host import cpu_name
from jaxserve.core.options import RuntimeOptions
from jaxserve.execution.sizes import platform_defaults
from jaxserve.models.config import DecoderConfig

# The longest length that is measured by default; attention of longer ones is extrapolated.
_MAX_LENGTH = 2048


@final
@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """The largest sizes that are measured; costs of larger ones are extrapolated.

    Attributes:
      max_tokens: tokens of a pass that encodes.
      max_batch: sequences of a pass that decodes.
      max_length: tokens of a sequence.
      page_size: tokens per page of the KV cache.
      kv_dtype: dtype of the KV cache; None for the model's.
      quantize: format of the layers' weights, "int8" or "int4"; None for dense ones.
      quantize_embeddings: format of the head where `quantize` is given, see `RuntimeOptions`.
    """

    max_tokens: int
    max_batch: int
    max_length: int
    page_size: int = 16
    kv_dtype: str | None = None
    quantize: str | None = None
    quantize_embeddings: str | None = None

    def __post_init__(self) -> None:
        if self.quantize == "keep":
            raise InvalidConfigError(
                "quantize='keep' is not allowed for layers with random weights, which have no "
                "blocks of a checkpoint to keep; pass 'int8' or 'int4'"
            )
        RuntimeOptions.parse(self.weights)  # refuses unknown formats
        for name in ("max_tokens", "max_batch", "max_length", "page_size"):
            if getattr(self, name) < 1:
                raise InvalidConfigError(
                    f"{name}={getattr(self, name)} is not allowed; pass at least 1"
                )

    @property
    def weights(self) -> dict[str, Any]:
        """The `RuntimeOptions` that say how weights are stored."""
        return {"quantize": self.quantize, "quantize_embeddings": self.quantize_embeddings}

    @classmethod
    def of(
        cls, config: DecoderConfig, *, max_length: int | None = None, kv_dtype: str | None = None
    ) -> LayerSizes:
        """Return the sizes that an engine has by default on this platform, of up to 2048 tokens."""
        defaults = platform_defaults()
        return cls(
            max_tokens=defaults.max_step_tokens,
            max_batch=defaults.max_slots,
            max_length=min(max_length or _MAX_LENGTH, config.max_position_embeddings),
            kv_dtype=kv_dtype,
        )


@final
@dataclass(frozen=True, kw_only=True)
class LayerOrigin:
    """The model, devices, sizes and versions that layers were measured with; all are compared."""

    model: dict[str, Any]
    device: dict[str, Any]
    sizes: dict[str, Any]
    versions: dict[str, str]

    @classmethod
    def of(cls, config: DecoderConfig, devices: Sequence[Any], sizes: LayerSizes) -> LayerOrigin:
        """Return the origin of what is measured on these devices, in the types of JSON."""
        device = devices[0]
        own = cls(
            model=asdict(config),
            device={
                "platform": device.platform,
                "kind": device.device_kind,
                "count": len(devices),
                "host_cpu": cpu_name(),
                "host_cores": len(os.sched_getaffinity(0)),
            },
            sizes=asdict(sizes),
            versions={name: metadata.version(name) for name in ("jax", "jaxlib", "jaxserve")},
        )
        return cls(**json.loads(json.dumps(asdict(own))))

    def differences(self, other: LayerOrigin) -> list[str]:
        """Describe the fields in which `other` differs."""
        own, others = self._flat(), other._flat()
        return [
            f"{name} is {others.get(name)!r}, not {own.get(name)!r}"
            for name in sorted({*own, *others})
            if own.get(name) != others.get(name)
        ]

    def _flat(self) -> dict[str, Any]:
        return {
            f"{part}.{name}": value
            for part, values in asdict(self).items()
            for name, value in values.items()
        }
