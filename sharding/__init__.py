"""Device meshes, the rules that place arrays on them, and the start-up of several processes."""

from jaxserve.sharding.mesh import (
    MESH_AXES,
    DeviceGroups,
    Stage,
    StagePlan,
    check_tensor_axis,
    make_groups,
    make_mesh,
    replica_meshes,
    split_replicas,
    stages_of,
)
from jaxserve.sharding.processes import JoinError, ProcessGroup, group_over, join
from jaxserve.sharding.rules import (
    DEFAULT_RULES,
    fitted_spec,
    named_sharding,
    partition_spec,
    placed,
    state_shardings,
)

__all__ = [
    "DEFAULT_RULES",
    "MESH_AXES",
    "DeviceGroups",
    "JoinError",
    "ProcessGroup",
    "Stage",
    "StagePlan",
    "check_tensor_axis",
    "fitted_spec",
    "group_over",
    "join",
    "make_groups",
    "make_mesh",
    "named_sharding",
    "partition_spec",
    "placed",
    "replica_meshes",
    "split_replicas",
    "stages_of",
    "state_shardings",
]
