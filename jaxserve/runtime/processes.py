"""Several processes around one model: who they are, and what each does with its executor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import Mesh

from jaxserve.core.errors import InvalidConfigError, ProcessGroupError
from jaxserve.execution.device import DeviceExecutor
from jaxserve.execution.following import FollowingExecutor
from jaxserve.execution.leading import LeadingExecutor
from jaxserve.execution.protocol import ModelExecutor
from jaxserve.steps.placement import Placement
from sharding import JoinError, ProcessGroup, StagePlan, group_over


def processes_of(mesh: Mesh | StagePlan | None, params: Any = None) -> ProcessGroup | None:
    """Those that serve on `mesh`, or where `params` are; None where this process does alone.

    Raises:
      InvalidConfigError: some of the job's processes are left out, or the mesh is one that only a
        single process can have.
      ProcessGroupError: they do not come together.
    """
    if mesh is None and params is not None:
        mesh = Placement.like(jax.tree.leaves(params)[0].sharding).mesh
    meshes = [s.mesh for s in mesh.stages] if isinstance(mesh, StagePlan) else [mesh]
    own = jax.process_index()
    if all(m is None or {d.process_index for d in m.devices.flat} == {own} for m in meshes):
        return None
    if not isinstance(mesh, Mesh) or mesh.size != mesh.shape.get("tensor", 1):
        raise InvalidConfigError(
            f"{mesh} reaches over several processes, which only a tensor axis can; give stages and "
            "replicas devices of one process"
        )
    with _process_errors():
        return group_over(mesh)


def claim(group: ProcessGroup | None) -> None:
    """Take the processes for one runtime, until its executor closes.

    Raises:
      ProcessGroupError: they have one already, or one of them has left.
    """
    if group is not None:
        with _process_errors():
            group.claim()


def in_group(executor: ModelExecutor, group: ProcessGroup | None) -> ModelExecutor:
    """The executor as this process is to have it: leading, following, or its own."""
    if group is None:
        return executor
    assert isinstance(executor, DeviceExecutor)
    return (LeadingExecutor if group.is_leader else FollowingExecutor)(executor, group)


@contextmanager
def _process_errors() -> Iterator[None]:
    try:
        yield
    except JoinError as error:
        raise ProcessGroupError(str(error)) from error
    except ValueError as error:
        raise InvalidConfigError(str(error)) from error
