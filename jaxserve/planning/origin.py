"""The origin of measured step times: model, device, configuration and versions."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any, final

import jax

from jaxserve.core.config import EngineConfig
from jaxserve.core.host import cpu_name
from sharding import StagePlan

# The fields of a configuration that change a compiled step, and so its time.
_COMPILED = (
    *("page_size", "kv_dtype", "max_context"),
    *("token_buckets", "slot_buckets", "head_buckets", "max_decode_iterations"),
    *("attention", "row_kernels", "num_proposed", "drafts", "max_adapters"),
)


@final
@dataclass(frozen=True, kw_only=True)
class Origin:
    """The model, device and configuration that step times were measured on.

    Attributes:
      model: the fields of the model's configuration by name, and dtypes and bytes of its weights.
      device: platform, kind and count of devices, processor and cores of the host, and the stages
        that the model is cut into, if it is.
      config: the sizes that the executables were compiled for.
      versions: of the software that compiles the steps.
    """

    model: dict[str, Any]
    device: dict[str, Any]
    config: EngineConfig
    versions: dict[str, str]

    @classmethod
    def of(
        cls,
        model_config: Any,
        params: Any,
        config: EngineConfig,
        stages: StagePlan | None = None,
    ) -> Origin:
        """Return the origin of a model and an engine's configuration.

        Args:
          model_config: the model's configuration, a dataclass.
          params: the parameters on their devices.
          stages: the stages that the model is cut into, which are then on devices of their own.
        """
        leaves = jax.tree.leaves(params)
        devices = set().union(*(leaf.sharding.device_set for leaf in leaves))
        device = next(iter(devices))
        return cls(
            model={
                **asdict(model_config),
                # Quantised weights, which the configuration does not know, have other times.
                "weight_dtypes": ", ".join(sorted({leaf.dtype.name for leaf in leaves})),
                "weight_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
            },
            device={
                "platform": device.platform,
                "kind": device.device_kind,
                "count": len(devices),
                "host_cpu": cpu_name(),
                "host_cores": len(os.sched_getaffinity(0)),
                **_described(stages),
            },
            config=config,
            versions={name: metadata.version(name) for name in ("jax", "jaxlib", "jaxserve")},
        )

    def on(self, num_devices: int) -> Origin:
        """Return the same with another number of devices."""
        return replace(self, device={**self.device, "count": num_devices})

    @classmethod
    def from_json(cls, read: dict[str, Any]) -> Origin:
        """Make an origin from its `dataclasses.asdict` after a round trip through JSON."""
        config: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in read["config"].items()
        }
        read = {**read, "config": EngineConfig(**config)}
        return cls(**read)

    def differences(self, other: Origin) -> list[str]:
        """Describe the fields of model, device, compiled sizes and versions that differ."""
        own, others = self._compared(), other._compared()
        return [
            f"{name} is {others.get(name)!r}, not {own.get(name)!r}"
            for name in sorted({*own, *others})
            if own.get(name) != others.get(name)
        ]

    @property
    def identity(self) -> str:
        """Text that is equal for origins without `differences`."""
        return json.dumps(self._compared(), sort_keys=True)

    def _compared(self) -> dict[str, Any]:
        model = {f"model.{name}": value for name, value in self.model.items()}
        device = {f"device.{name}": value for name, value in self.device.items()}
        sizes = {name: getattr(self.config, name) for name in _COMPILED}
        versions = {f"version.{name}": value for name, value in self.versions.items()}
        return json.loads(json.dumps({**model, **device, **sizes, **versions}))


def _described(stages: StagePlan | None) -> dict[str, Any]:
    """Return the number of devices and the shape of the stages; nothing without stages."""
    if stages is None:
        return {}
    shape = [(len(stage.layers), stage.num_shards) for stage in stages.stages]
    return {
        "count": sum(num_shards for _, num_shards in shape),
        "stages": shape,
        "micro_batches": stages.micro_batches,
    }
