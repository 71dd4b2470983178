"""The shapes of a call's arguments, by which its executable is found."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def abstract(tree: Any) -> Any:
    """Return the shapes, dtypes and shardings of a pytree's arrays, for `prepare`."""
    return jax.tree.map(_abstract, tree)


def _abstract(leaf: Any) -> Any:
    """Return the shape of an array on devices; arrays of the host are placed by each call."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type
    )


def shape_of(leaf: Any) -> Any:
    """Return the shape of an array on devices or of the host, for a key."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return _abstract(leaf)


def size_of(argument: Any) -> tuple[int, ...] | None:
    """Return the shape of the first array of an argument."""
    if argument is None:
        return None
    if isinstance(argument, (np.ndarray, np.generic, jax.Array)):
        return argument.shape
    leaves = jax.tree.leaves(argument)
    return leaves[0].shape if leaves else None


def signature_of(arguments: tuple[Any, ...], static: dict[str, Any]) -> Any:
    """Return what distinguishes the executables of one function."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple(map(_leaf_signature, leaves)), *static.values()


def _leaf_signature(leaf: Any) -> Any:
    placed = isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
    return leaf.shape, leaf.dtype, leaf.sharding.memory_kind if placed and leaf.sharding else None
