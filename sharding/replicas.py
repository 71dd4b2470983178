"""The replicas of a mesh: one at each index of its `data` axis."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

DATA = "data"


def replica_meshes(mesh: Mesh) -> list[Mesh]:
    """Return a mesh for each index of the `data` axis: the same axes, with `data` of size 1."""
    axis = mesh.axis_names.index(DATA)
    return [
        Mesh(np.take(mesh.devices, [index], axis), mesh.axis_names, axis_types=mesh.axis_types)
        for index in range(mesh.shape[DATA])
    ]


def split_replicas(tree: Any) -> list[Any]:
    """Return a pytree of arrays for each replica of `tree`'s mesh; they share its buffers.

    The result is `[tree]` when the mesh has no `data` axis of at least 2, when an array is split
    over `data`, since there are then no whole replicas of it, and without arrays, or with NumPy's.
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
