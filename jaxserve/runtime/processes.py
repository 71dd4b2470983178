"""The processes that serve one model together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import Mesh

from jaxserve.core.errors import InvalidConfigError, ProcessGroupError
from jaxserve.steps.placement import Placement
from sharding import DeviceGroups, JoinError, ProcessGroup, StagePlan, group_over


def processes_of(
    mesh: Mesh | StagePlan | DeviceGroups | None, params: Any = None
) -> ProcessGroup | None:
    """Return the processes of `mesh`, or of the devices of `params`.

    Returns:
      None if all devices belong to this process.

    Raises:
      InvalidConfigError: the mesh omits some of the job's processes, or has device groups, stages
        or replicas over several processes.
      ProcessGroupError: the processes could not form a group.
    """
    if mesh is None and params is not None:
        mesh = Placement.like(jax.tree.leaves(params)[0].sharding).mesh
    if isinstance(mesh, DeviceGroups):
        used = [device for devices in mesh.devices for device in devices]
    else:
        meshes = [s.mesh for s in mesh.stages] if isinstance(mesh, StagePlan) else [mesh]
        used = [device for m in meshes if m is not None for device in m.devices.flat]
    if {device.process_index for device in used} <= {jax.process_index()}:
        return None
    if not isinstance(mesh, Mesh) or mesh.size != mesh.shape.get("tensor", 1):
        raise InvalidConfigError(
            f"{mesh} extends over several processes, which only a tensor axis can; pass groups, "
            "stages and replicas on devices of one process"
        )
    with _process_errors():
        return group_over(mesh)


def claim(group: ProcessGroup | None) -> None:
    """Reserve the processes for one runtime, until its executor closes.

    Raises:
      ProcessGroupError: they serve another runtime, or one of them has left.
    """
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
