"""Which replicas a mesh means, and which parameters each of them begins with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from jax.sharding import Mesh

from jaxserve.execution.weights import sharded
from jaxserve.models.parts import planned_stages
from sharding import StagePlan, replica_meshes, split_replicas


@final
@dataclass(frozen=True)
class Place:
    """A replica to be: parameters of the whole model, and the stages to cut it into, if any."""

    params: Any
    stages: StagePlan | None = None


def place_replicas(params: Any, mesh: Mesh | StagePlan | None, model_config: Any) -> list[Place]:
    """One for each index of the mesh's `data` axis; what lies on its devices is shared.

    Raises:
      InvalidConfigError: the mesh does not fit the model.
    """
    if planned_stages(mesh, model_config) is None:
        if isinstance(mesh, Mesh):
            params = sharded(params, mesh, model_config)
        return [Place(part) for part in split_replicas(params)]
    meshes = replica_meshes(mesh) if isinstance(mesh, Mesh) else [mesh]
    return [Place(params, planned_stages(each, model_config)) for each in meshes]
