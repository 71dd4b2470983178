"""Device meshes and the rules that place parameters and caches on them."""

from sharding.mesh import MESH_AXES, check_tensor_axis, make_mesh
from sharding.replicas import replica_meshes, split_replicas
from sharding.rules import DEFAULT_RULES, named_sharding, partition_spec, state_shardings
from sharding.stages import Stage, StagePlan, stages_of

__all__ = [
    "DEFAULT_RULES",
    "MESH_AXES",
    "Stage",
    "StagePlan",
    "check_tensor_axis",
    "make_mesh",
    "named_sharding",
    "partition_spec",
    "replica_meshes",
    "split_replicas",
    "stages_of",
    "state_shardings",
]
