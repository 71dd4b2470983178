"""The processes that serve one model together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import Mesh

from jaxserve.core.errors import InvalidConfigError, ProcessGroupError
from jaxserve.sharding import DeviceGroups, JoinError, ProcessGroup, StagePlan, group_over
from jaxserve.steps.step_function import Placement


def processes_of(
    mesh: Mesh | StagePlan | DeviceGroups | None, params: Any = None
) -> ProcessGroup | None:
    """Return the processes of `mesh`, or of the devices of `params`; None for this process alone.

    Raises:
      InvalidConfigError: the mesh omits some of the job's processes, has stages or replicas over
        several processes, or two device groups in one of several processes.
      ProcessGroupError: the processes could not form a group.
    """
    if mesh is None and params is not None:
        mesh = Placement.like(jax.tree.leaves(params)[0].sharding).mesh
    groups = mesh.both if isinstance(mesh, DeviceGroups) else (mesh,)
    meshes = [
        each
        for group in groups
        for each in ([s.mesh for s in group.stages] if isinstance(group, StagePlan) else [group])
        if each is not None
    ]
    used = [device for each in meshes for device in each.devices.flat]
    if {device.process_index for device in used} <= {jax.process_index()}:
        return None
    for group in groups:
        if not isinstance(group, Mesh) or group.size != group.shape.get("tensor", 1):
            raise InvalidConfigError(
                f"{group} is not allowed where the devices of a mesh belong to several processes; "
                "only a tensor axis, or two groups with one each, can be divided among them. Pass "
                "stages and replicas on devices of one process"
            )
    if isinstance(mesh, DeviceGroups):
        _check_apart(mesh)
    assert not isinstance(mesh, StagePlan)
    with _process_errors():
        return group_over(mesh)


def own_mesh(
    mesh: Mesh | StagePlan | DeviceGroups | None, group: ProcessGroup | None
) -> Mesh | StagePlan | DeviceGroups | None:
    """Return the part of a mesh with this process's devices; one of two groups in two processes."""
    if group is None or not isinstance(mesh, DeviceGroups):
        return mesh
    return mesh.both[0 if group.process_id in mesh.processes[0] else 1]


def _check_apart(mesh: DeviceGroups) -> None:
    """Raise InvalidConfigError if a process has devices of both groups."""
    encode, decode = mesh.processes
    both = sorted(set(encode) & set(decode))
    if both:
        raise InvalidConfigError(
            f"mesh has {mesh}, and process(es) {both} of {jax.process_count()} would have devices "
            "of both groups; where several processes serve a model, all devices that it uses of a "
            "process are in one group. Pass numbers that end with a process, such as "
            f"encode={jax.local_device_count()} and decode="
            f"{jax.device_count() - jax.local_device_count()}"
        )


def claim(group: ProcessGroup | None) -> None:
    """Reserve the processes until the executor closes, or raise ProcessGroupError."""
    if group is not None:
        with _process_errors():
            group.claim()


@contextmanager
def _process_errors() -> Iterator[None]:
    try:
        yield
    except JoinError as error:
        raise ProcessGroupError(str(error)) from error
    except ValueError as error:
        raise InvalidConfigError(str(error)) from error
