"""Code that runs on each shard of the `tensor` axis, with a mesh or without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

TENSOR = "tensor"


def num_tensor_shards() -> int:
    """Return the number of tensor shards of the current mesh during tracing; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape.get(TENSOR, 1)


def over_tensor(
    function: Callable[..., Any], *, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Map `function` over the tensor shards of the current mesh; with one shard, return it as is.

    Kernels are called this way, since XLA cannot partition them.
    """
    if num_tensor_shards() == 1:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def whole(tree: Any) -> Any:
    """Return arrays whole on every tensor shard. Not inside `over_tensor`."""
    if num_tensor_shards() == 1:
        return tree
    return lax.with_sharding_constraint(tree, PartitionSpec())


def sum_over_tensor(x: jax.Array, num_shards: int) -> jax.Array:
    """Return the sum of `x` over all shards. Only inside `over_tensor`."""
    return x if num_shards == 1 else lax.psum(x, TENSOR)


def tensor_index(num_shards: int) -> int | jax.Array:
    """Return the index of this shard. Only inside `over_tensor`."""
    return 0 if num_shards == 1 else lax.axis_index(TENSOR)
