"""Weights of two device groups on their way to other devices, array by array."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, final

import jax
from jax.sharding import Sharding

from sharding import placed

# Raises if the work is to end; called again and again.
Check = Callable[[], None]
# Arrays of two groups, as (group, index).
Leaves = frozenset[tuple[int, int]]


@final
class MovingWeights:
    """The weights of both device groups, while they are placed on other devices.

    Both groups have the same arrays, each in shards of its own. An array is freed on its former
    devices as soon as it is placed. So nothing else may refer to the weights meanwhile; those that
    others share are not freed in any case, and are kept to be put back.

    Args:
      params: the parameters of each group.
      shared: the arrays that others share.
    """

    def __init__(self, params: Sequence[Any], shared: Leaves = frozenset()):
        flat = [jax.tree.flatten(each) for each in params]
        self._leaves: list[list[jax.Array]] = [leaves for leaves, _ in flat]
        self._structures = [structure for _, structure in flat]
        self._former = [[leaf.sharding for leaf in leaves] for leaves in self._leaves]
        self._kept = {(group, index): self._leaves[group][index] for group, index in shared}

    @property
    def params(self) -> list[Any]:
        """The parameters of each group where they are now."""
        pairs = zip(self._structures, self._leaves, strict=True)
        return [jax.tree.unflatten(structure, leaves) for structure, leaves in pairs]

    def place(self, shardings: Sequence[Sequence[Sharding]], check: Check) -> None:
        """Place every array, and free it where it was. Arrays that are in place are not copied.

        If it fails, some arrays are placed, and the others are where they were.

        Args:
          shardings: the place of every array of each group.
          check: called after each array.
        """
        for index in range(len(self._leaves[0])):
            self._place(index, shardings)
            check()

    def put_back(self, check: Check) -> None:
        """Place every array where it was at first; the last one first, as `place` has left them.

        So a device has no more at a time than during `place`.
        """
        for index in reversed(range(len(self._leaves[0]))):
            self._place(index, self._former)
            check()

    def _place(self, index: int, shardings: Sequence[Sequence[Sharding]]) -> None:
        new = [self._placed(group, index, own[index]) for group, own in enumerate(shardings)]
        jax.block_until_ready(new)
        for leaves, leaf in zip(self._leaves, new, strict=True):
            leaves[index] = leaf

    def _placed(self, group: int, index: int, sharding: Sharding) -> jax.Array:
        for leaf in (self._leaves[group][index], self._kept.get((group, index))):
            if leaf is not None and leaf.sharding == sharding:
                return leaf
        return placed(self._leaves[0][index], sharding)


@final
@dataclass(frozen=True)
class WeightsMemory:
    """Bytes of weights on the devices of two groups, during and after a move.

    Attributes:
      most_bytes: the most that a device has at a time, while an array is placed before it is freed
        where it was.
      group_bytes: what the fullest device of each group has in the end.
    """

    most_bytes: int
    group_bytes: tuple[int, ...]


def weights_memory(
    params: Sequence[Any], shardings: Sequence[Sequence[Sharding]], shared: Leaves = frozenset()
) -> WeightsMemory:
    """Return the memory that `MovingWeights.place` needs.

    Args:
      params: the present parameters of each group.
      shardings: the place of every array of each group after the move.
      shared: the arrays that others share, which stay in memory.
    """
    groups = [jax.tree.leaves(each) for each in params]
    held: Counter[Any] = Counter()

    @cache
    def shard_bytes(shape: tuple[int, ...], itemsize: int, sharding: Sharding) -> int:
        return prod(sharding.shard_shape(shape)) * itemsize

    @cache
    def devices(sharding: Sharding) -> tuple[Any, ...]:
        return tuple(sharding.device_set)

    def count(leaf: jax.Array, sharding: Sharding, sign: int = 1) -> None:
        for device in devices(sharding):
            held[device] += sign * shard_bytes(leaf.shape, leaf.dtype.itemsize, sharding)

    for leaves in groups:
        for leaf in leaves:
            count(leaf, leaf.sharding)
    most = max(held.values())
    for index in range(len(groups[0])):
        moving = [
            (group, leaves[index], own[index])
            for group, (leaves, own) in enumerate(zip(groups, shardings, strict=True))
            if leaves[index].sharding != own[index]
        ]
        for _, leaf, sharding in moving:
            count(leaf, sharding)
        most = max(most, *held.values())
        for group, leaf, _ in moving:
            if (group, index) not in shared:
                count(leaf, leaf.sharding, -1)
    after = (max(held[device] for device in devices(own[0])) for own in shardings)
    return WeightsMemory(most, tuple(after))


def shared_leaves(params: Sequence[Any]) -> Leaves:
    """Return the arrays of two groups whose memory other live arrays of this process have, too.

    The arrays of a model that the caller has given to the runtime are such arrays. Their memory is
    not freed when the runtime lets go of its own.
    """
    leaves = {
        (group, index): leaf
        for group, each in enumerate(params)
        for index, leaf in enumerate(jax.tree.leaves(each))
    }
    own = {id(part) for leaf in leaves.values() for part in (leaf, *_parts(leaf))}
    kinds = {(leaf.shape, leaf.dtype) for leaf in leaves.values()}
    others: set[tuple[int, int]] = set()
    for array in jax.live_arrays():
        if (array.shape, array.dtype) in kinds and id(array) not in own:
            others |= _addresses(array)
    return frozenset(at for at, leaf in leaves.items() if not others.isdisjoint(_addresses(leaf)))


def _parts(array: jax.Array) -> list[jax.Array]:
    return [shard.data for shard in array.addressable_shards]


def _addresses(array: jax.Array) -> set[tuple[int, int]]:
    """Return device and address of each shard; none of an array that was donated meanwhile."""
    try:
        parts = _parts(array)
        return {(next(iter(part.devices())).id, part.unsafe_buffer_pointer()) for part in parts}
    except RuntimeError:
        return set()
