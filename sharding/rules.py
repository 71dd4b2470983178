"""The rules that map logical axes of parameters and caches to mesh axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

# These are replicated when their size is not a multiple of the mesh axis's: fewer KV heads than
# shards, vocabularies such as GPT-2's 50257, the channels of recurrent layers, and the groups and
# panels of a quantised weight.
REPLICATED_IF_UNEVEN = ("kv_heads", "vocab", "channels", "groups", "panels")

# Logical axis -> mesh axis; None means replicated.
DEFAULT_RULES: Mapping[str, str | None] = MappingProxyType(
    {
        "vocab": "tensor",
        "embed": None,
        "kv_heads": "tensor",
        "mlp": "tensor",
        "experts": "tensor",
        "channels": "tensor",
        "layers": None,
        "groups": "tensor",
        "panels": "tensor",
    }
)


def partition_spec(
    logical_axes: Sequence[str | None], rules: Mapping[str, str | None] = DEFAULT_RULES
) -> PartitionSpec:
    """Return the mesh axes of an array whose dimensions have these logical names (None: unnamed).

    Raises:
      ValueError: the rules lack a name, or two dimensions map to one mesh axis.
    """
    unknown = [axis for axis in logical_axes if axis is not None and axis not in rules]
    if unknown:
        raise ValueError(f"logical axes {unknown} are unknown; known are {sorted(rules)}")
    mesh_axes = [None if axis is None else rules[axis] for axis in logical_axes]
    used = [axis for axis in mesh_axes if axis is not None]
    if len(set(used)) != len(used):
        raise ValueError(
            f"logical axes {tuple(logical_axes)} map to mesh axes {tuple(mesh_axes)}, but a mesh "
            "axis can split one dimension only; rename a logical axis or change the rules"
        )
    return PartitionSpec(*mesh_axes)


def named_sharding(
    mesh: Mesh,
    shape: Sequence[int],
    logical_axes: Sequence[str | None],
    rules: Mapping[str, str | None] = DEFAULT_RULES,
) -> NamedSharding:
    """Return the sharding of an array of this shape on `mesh`.

    A dimension is replicated when `mesh` lacks its axis, and when it is one of
    `REPLICATED_IF_UNEVEN` and its size is not a multiple of the axis's.

    Raises:
      ValueError: the number of names differs from the number of dimensions, or another dimension
        is not a multiple of its mesh axis's size.
    """
    return NamedSharding(mesh, fitted_spec(mesh.shape, shape, logical_axes, rules))


def fitted_spec(
    mesh_shape: Mapping[str, int],
    shape: Sequence[int],
    logical_axes: Sequence[str | None],
    rules: Mapping[str, str | None] = DEFAULT_RULES,
) -> PartitionSpec:
    """Return the mesh axes of an array of this shape, as `named_sharding` has them.

    `mesh_shape` is the size of each axis of the mesh.
    """
    if len(logical_axes) != len(shape):
        raise ValueError(
            f"logical axes {tuple(logical_axes)} do not fit the shape {tuple(shape)}; pass one per "
            "dimension"
        )
    entries = [axis if axis in mesh_shape else None for axis in partition_spec(logical_axes, rules)]
    for i, (size, name, axis) in enumerate(zip(shape, logical_axes, entries, strict=True)):
        if axis is None or size % mesh_shape[axis] == 0:
            continue
        if name in REPLICATED_IF_UNEVEN:
            entries[i] = None
        else:
            raise ValueError(
                f"logical axis {name!r} of size {size} is not a multiple of mesh axis {axis!r} of "
                f"size {mesh_shape[axis]}; use a mesh whose {axis!r} size divides it"
            )
    return PartitionSpec(*entries)


def state_shardings(
    state: nnx.State, mesh: Mesh, rules: Mapping[str, str | None] = DEFAULT_RULES
) -> nnx.State:
    """Return the `NamedSharding` of every variable of `state`, in the same structure.

    `state` may be abstract. A variable's metadata `logical_axes` is a tuple with one name or None
    per dimension; a variable without it is replicated. A ValueError of `named_sharding` names the
    variable.
    """

    def place(path: tuple[object, ...], variable: nnx.Variable) -> nnx.Variable:
        shape = variable.get_value().shape
        axes = variable.get_metadata().get("logical_axes") or (None,) * len(shape)
        try:
            return variable.replace(named_sharding(mesh, shape, axes, rules))
        except ValueError as error:
            raise ValueError(f"{'.'.join(map(str, path))}: {error}") from error

    return nnx.map_state(place, state)


def placed(tree: Any, shardings: Any) -> Any:
    """Place `tree` by `shardings` (one, or one per leaf), without copying arrays that are in place.

    For shardings over several processes, each process passes the same values and keeps its shard.
    """
    if isinstance(shardings, Sharding):
        return jax.tree.map(lambda x: _put(x, shardings), tree)
    return jax.tree.map(_put, tree, shardings)


def _put(x: Any, sharding: Sharding) -> jax.Array:
    is_own = not isinstance(x, jax.Array) or x.is_fully_addressable
    if sharding.is_fully_addressable or not is_own:
        return jax.device_put(x, sharding)
    values = np.asarray(x)  # device_put would send them to all processes, to compare
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that puts a whole copy on every device of `mesh`."""
    return NamedSharding(mesh, PartitionSpec())
