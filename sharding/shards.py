"""Code that works on one shard of the `tensor` axis at a time, on a mesh or without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

TENSOR = "tensor"


def num_tensor_shards() -> int:
    """Of the mesh that is in force where this is traced; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape.get(TENSOR, 1)


def over_tensor(
    function: Callable[..., Any], *, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`function` on each shard of the mesh in force, or as it is where nothing is shared out.

    Kernels are called this way: XLA cannot cut them.
    """
    if num_tensor_shards() == 1:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def sum_over_tensor(x: jax.Array, num_shards: int) -> jax.Array:
    """Within `over_tensor`: the sum of all shards' `x`."""
    return x if num_shards == 1 else lax.psum(x, TENSOR)


def tensor_index(num_shards: int) -> int | jax.Array:
    """Within `over_tensor`: which shard this is."""
    return 0 if num_shards == 1 else lax.axis_index(TENSOR)
