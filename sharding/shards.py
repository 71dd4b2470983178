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
    """Return arrays whose last axis is whole on every tensor shard. Not inside `over_tensor`.

    Their other axes stay split as they are, such as tokens over a trainer's `data` axis.
    """
    if num_tensor_shards() == 1:
        return tree
    others = PartitionSpec.UNCONSTRAINED

    def last_whole(x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, PartitionSpec(*[others] * (x.ndim - 1), None))

    return jax.tree.map(last_whole, tree)


def sum_over_tensor(x: jax.Array, num_shards: int) -> jax.Array:
    """Return the sum of `x` over all shards. Only inside `over_tensor`."""
    return x if num_shards == 1 else lax.psum(x, TENSOR)


def tensor_index(num_shards: int) -> int | jax.Array:
    """Return the index of this shard. Only inside `over_tensor`."""
    return 0 if num_shards == 1 else lax.axis_index(TENSOR)
