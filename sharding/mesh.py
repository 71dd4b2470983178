"""Device meshes: `data` x `stage` x `tensor`, in this order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

MESH_AXES = ("data", "stage", "tensor")


def make_mesh(
    *,
    data: int = 1,
    stage: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh over the first `data * stage * tensor` devices (JAX's own order by default).

    Raises:
      ValueError: a size below 1, or more devices asked for than there are.
    """
    sizes = {"data": data, "stage": stage, "tensor": tensor}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh axis {name}={size!r} is not allowed; give a whole number >= 1")
    available = list(jax.devices() if devices is None else devices)
    needed = data * stage * tensor
    if needed > len(available):
        raise ValueError(
            f"mesh {sizes} needs {needed} devices, but there are {len(available)} "
            f"({available[0].platform if available else 'none'}); lower an axis"
        )
    return Mesh(np.asarray(available[:needed]).reshape(data, stage, tensor), MESH_AXES)
