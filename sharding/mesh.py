"""Device meshes with the axes `data`, `stage` and `tensor`, in this order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

MESH_AXES = ("data", "stage", "tensor")


def check_tensor_axis(mesh: Mesh, *, num_heads: int, num_kv_heads: int, num_mlp_parts: int) -> None:
    """Check that the mesh's `tensor` axis can split a model's layers.

    The number of KV heads must be a multiple of the number of shards or divide it; in the second
    case several shards hold a copy of each KV head.

    Raises:
      ValueError: the axis does not fit; the message lists the sizes that do.
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
    *,
    data: int = 1,
    stage: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
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
