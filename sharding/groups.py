"""Two groups of devices that each hold the whole model: one for prompts, one for answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
from jax.sharding import Mesh

from sharding.mesh import make_mesh
from sharding.stages import StagePlan


@final
@dataclass(frozen=True)
class DeviceGroups:
    """The devices that compute prompts, and those that compute answers.

    This is workload-aware allocation (WAA) of ExeGPT (section 4.1), or disaggregated prefill. Each
    group has its own copy of the model, in one piece or in stages.

    Attributes:
      encode: where prompts and first tokens are computed.
      decode: where all other tokens are computed.

    Raises:
      ValueError: a device is in both groups, or a mesh has a `data` axis of more than 1.
    """

    encode: Mesh | StagePlan
    decode: Mesh | StagePlan

    def __post_init__(self) -> None:
        shared = sorted(str(device) for device in set(self.devices[0]) & set(self.devices[1]))
        if shared:
            raise ValueError(
                f"{', '.join(shared)} would be in both device groups; give each group devices of "
                "its own, for instance with make_groups"
            )
        for name, group in (("encode", self.encode), ("decode", self.decode)):
            if isinstance(group, Mesh) and group.shape.get("data", 1) > 1:
                raise ValueError(
                    f"the {name} group has a data axis of {group.shape['data']}, and a group is "
                    "one copy of the model; use the axes stage and tensor"
                )

    @property
    def both(self) -> tuple[Mesh | StagePlan, Mesh | StagePlan]:
        """The encode group and the decode group, in the order of their numbers in plans."""
        return self.encode, self.decode

    @property
    def devices(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The devices of the encode group, and those of the decode group."""
        return _devices(self.encode), _devices(self.decode)

    @property
    def processes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids of the processes that own the devices of each group, in increasing order."""
        first, second = (
            tuple(sorted({device.process_index for device in group})) for group in self.devices
        )
        return first, second

    def __str__(self) -> str:
        encode, decode = map(len, self.devices)
        return f"{encode} devices for prompts and {decode} for answers"


def make_groups(
    *, encode: int = 1, decode: int = 1, devices: Sequence[Any] | None = None
) -> DeviceGroups:
    """Make two tensor-parallel groups of the first `encode + decode` devices.

    For stages, make a `DeviceGroups` of `StagePlan`s.

    Args:
      encode: number of devices that compute prompts.
      decode: number of devices that compute answers.
      devices: default `jax.devices()`.

    Raises:
      ValueError: a number is below 1, or there are too few devices.
    """
    available = list(jax.devices() if devices is None else devices)
    first = make_mesh(tensor=encode, devices=available)
    if encode + decode > len(available):
        raise ValueError(
            f"groups of {encode} and {decode} devices need {encode + decode}, but there are "
            f"{len(available)}; make a group smaller"
        )
    return DeviceGroups(first, make_mesh(tensor=decode, devices=available[encode:]))


def _devices(group: Mesh | StagePlan) -> tuple[Any, ...]:
    meshes = [group] if isinstance(group, Mesh) else [stage.mesh for stage in group.stages]
    return tuple(device for mesh in meshes for device in mesh.devices.flat)
