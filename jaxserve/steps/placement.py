"""Placement of the engine's arrays: on one device, or on the mesh of the parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from sharding.rules import replicated
from sharding.shards import TENSOR


@final
@dataclass(frozen=True)
class Placement:
    """The shardings of everything that the engine makes in addition to the parameters."""

    mesh: Mesh | None  # None on one device
    whole: Sharding  # sharding of slots and outputs, a copy on every device
    pages: Sharding  # sharding of the cache, its KV heads split over the mesh's `tensor` axis

    @classmethod
    def like(cls, sharding: Sharding) -> Placement:
        """Return the placement that matches parameters with this sharding."""
        if not isinstance(sharding, NamedSharding):
            return cls(None, sharding, sharding)
        mesh: Any = sharding.mesh
        pages = PartitionSpec(None, None, TENSOR if TENSOR in mesh.shape else None)
        return cls(mesh, replicated(mesh), NamedSharding(mesh, pages))

    @property
    def num_shards(self) -> int:
        """Return the number of parts that the KV heads are split into."""
        return 1 if self.mesh is None else self.mesh.shape.get(TENSOR, 1)

    def in_force(self) -> AbstractContextManager[Any]:
        """Return the context in which executables are traced and called."""
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)


def staging_place(place: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Return the sharding of incoming pages: pinned host memory, which the device can read."""
    return place.with_memory_kind("pinned_host")
