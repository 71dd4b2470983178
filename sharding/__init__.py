"""Device meshes, the rules that place arrays on them, and the start-up of several processes."""

from sharding.groups import DeviceGroups, make_groups
from sharding.mesh import MESH_AXES, check_tensor_axis, make_mesh
from sharding.process_group import JoinError, ProcessGroup
from sharding.processes import group_over, join
from sharding.replicas import replica_meshes, split_replicas
from sharding.rules import (
    DEFAULT_RULES,
    fitted_spec,
    named_sharding,
    partition_spec,
    placed,
    state_shardings,
)
from sharding.stages import Stage, StagePlan, stages_of

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
