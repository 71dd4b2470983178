"""Device meshes, and the parts made from them: stage plans, two device groups, replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

MESH_AXES = ("data", "stage", "tensor")

DATA = "data"


def check_tensor_axis(mesh: Mesh, *, num_heads: int, num_kv_heads: int, num_mlp_parts: int) -> None:
    """Raise ValueError if the mesh's `tensor` axis cannot split a model's layers.

    The number of KV heads must be a multiple of the number of shards or divide it; in the second
    case several shards hold a copy of each KV head. The message lists the sizes that fit.
    """

    def fits(shards: int) -> bool:
        kv = num_kv_heads % shards == 0 or shards % num_kv_heads == 0
        return num_heads % shards == 0 and num_mlp_parts % shards == 0 and kv

    shards = mesh.shape.get("tensor", 1)
    if not fits(shards):
        allowed = [size for size in range(1, num_heads + 1) if fits(size)]
        raise ValueError(
            f"a tensor axis of {shards} does not divide {num_heads} query heads, {num_kv_heads} KV "
            f"heads and {num_mlp_parts} MLP parts; use one of {allowed}"
        )


def make_mesh(
    *, data: int = 1, stage: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """Make a mesh over the first `data * stage * tensor` of `devices` (default: `jax.devices()`).

    Raises:
      ValueError: a size is below 1, or there are too few devices.
    """
    sizes = {"data": data, "stage": stage, "tensor": tensor}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh axis {name}={size!r} is not allowed; pass a whole number >= 1")
    available = list(jax.devices() if devices is None else devices)
    needed = data * stage * tensor
    if needed > len(available):
        raise ValueError(
            f"mesh {sizes} needs {needed} devices, but only {len(available)} are available "
            f"({available[0].platform if available else 'none'}); reduce the size of an axis"
        )
    return Mesh(np.asarray(available[:needed]).reshape(data, stage, tensor), MESH_AXES)


@final
@dataclass(frozen=True)
class Stage:
    """A range of layers on a mesh, split over its `tensor` axis."""

    mesh: Mesh
    layers: range

    @property
    def num_shards(self) -> int:
        return self.mesh.shape["tensor"]


@final
@dataclass(frozen=True)
class StagePlan:
    """The stages of a model, in the order of their layers.

    Attributes:
      micro_batches: number of parts of a step, so that several stages work at the same time; a
        power of two.
    """

    stages: tuple[Stage, ...]
    micro_batches: int

    @classmethod
    def of(
        cls,
        num_layers: Sequence[int],
        *,
        tensor: int | Sequence[int] = 1,
        micro_batches: int | None = None,
        devices: Sequence[Any] | None = None,
    ) -> Self:
        """Make a plan over the first devices of `devices` (default: `jax.devices()`).

        Args:
          tensor: number of shards of each stage, or one number for all stages.
          micro_batches: by default the number of stages, rounded up to a power of two.

        Raises:
          ValueError: a number is below 1, the lists differ in length, or there are too few devices.
        """
        shards = [tensor] * len(num_layers) if isinstance(tensor, int) else list(tensor)
        numbers = [*num_layers, *shards]
        if not num_layers or any(isinstance(n, bool) or int(n) != n or n < 1 for n in numbers):
            raise ValueError(
                f"stages with {list(num_layers)} layers and {shards} shards are not allowed; pass "
                "a whole number of at least 1 for each"
            )
        if len(shards) != len(num_layers):
            raise ValueError(
                f"{len(num_layers)} stages, but {len(shards)} numbers of shards; pass one per "
                "stage, or one for all"
            )
        available = list(jax.devices() if devices is None else devices)
        if sum(shards) > len(available):
            raise ValueError(
                f"stages with {shards} shards need {sum(shards)} devices, but there are "
                f"{len(available)}; reduce the number of shards"
            )
        micro_batches = micro_batches or 1 << (len(shards) - 1).bit_length()
        if micro_batches < 1 or micro_batches & (micro_batches - 1):
            raise ValueError(
                f"micro_batches={micro_batches} is not allowed; pass a power of two: 1, 2, 4, ..."
            )
        bounds = zip(accumulate(num_layers, initial=0), accumulate(num_layers), strict=False)
        parts = zip(accumulate(shards, initial=0), accumulate(shards), strict=False)
        stages = [
            Stage(make_mesh(tensor=last - first, devices=available[first:last]), range(begin, end))
            for (begin, end), (first, last) in zip(bounds, parts, strict=True)
        ]
        return cls(tuple(stages), micro_batches)

    @property
    def num_layers(self) -> int:
        return self.stages[-1].layers.stop

    def __str__(self) -> str:
        return " + ".join(f"{len(stage.layers)}x{stage.num_shards}" for stage in self.stages)


def stages_of(mesh: Mesh | StagePlan | None, num_layers: int) -> StagePlan | None:
    """Return the stage plan of a model with `num_layers`; None if `mesh` has a single stage.

    A mesh whose `stage` axis is longer than 1 gives one stage per index. The stages' numbers of
    layers differ by at most 1.

    Raises:
      ValueError: there are more stages than layers.
    """
    if not isinstance(mesh, Mesh):
        return mesh
    size = mesh.shape.get("stage", 1)
    if size == 1:
        return None
    if size > num_layers:
        raise ValueError(
            f"a stage axis of {size} is more than the model's {num_layers} layers; use a mesh with "
            "fewer stages"
        )
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index("stage"), 0)
    return StagePlan.of(
        [num_layers // size + (i < num_layers % size) for i in range(size)],
        tensor=mesh.shape.get("tensor", 1),
        devices=list(devices.reshape(-1)),
    )


@final
@dataclass(frozen=True)
class DeviceGroups:
    """The devices that compute prompts, and the devices that compute answers.

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
    """Make two tensor-parallel groups of devices: `encode` for prompts, `decode` for answers.

    They are the first of `devices` (default: `jax.devices()`). For stages, make a `DeviceGroups` of
    `StagePlan`s.

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


def replica_meshes(mesh: Mesh) -> list[Mesh]:
    """Return a mesh for each index of the `data` axis: the same axes, with `data` of size 1."""
    axis = mesh.axis_names.index(DATA)
    return [
        Mesh(np.take(mesh.devices, [index], axis), mesh.axis_names, axis_types=mesh.axis_types)
        for index in range(mesh.shape[DATA])
    ]


def split_replicas(tree: Any) -> list[Any]:
    """Return a pytree of arrays for each replica of `tree`'s mesh; they share its buffers.

    The result is `[tree]` if the mesh has no `data` axis of at least 2, if an array is split over
    `data`, because it then has no whole replicas, and without arrays, or with NumPy's.
    """
    leaves, structure = jax.tree.flatten(tree)
    shardings = [leaf.sharding if isinstance(leaf, jax.Array) else None for leaf in leaves]
    if not leaves or not all(map(_is_replicated, shardings)):
        return [tree]
    first: Any = shardings[0]
    return [
        structure.unflatten([_part(leaf, mesh) for leaf in leaves])
        for mesh in replica_meshes(first.mesh)
    ]


def _is_replicated(sharding: Any) -> bool:
    """Return whether every index of a `data` axis of at least 2 holds the same values."""
    if not isinstance(sharding, NamedSharding) or sharding.mesh.shape.get(DATA, 1) == 1:
        return False
    return not any(DATA in (axes if isinstance(axes, tuple) else (axes,)) for axes in sharding.spec)


def _part(array: jax.Array, mesh: Mesh) -> jax.Array:
    devices = set(mesh.devices.flat)
    shards = [shard.data for shard in array.addressable_shards if shard.device in devices]
    sharding: Any = array.sharding
    return jax.make_array_from_single_device_arrays(
        array.shape, NamedSharding(mesh, sharding.spec), shards
    )
