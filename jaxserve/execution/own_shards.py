"""The part of page arrays that one of several processes has on its own devices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, final

import jax
import numpy as np


@final
class OwnShards:
    """This process's part of arrays [layers, pages, kv_heads, ...] that are split by KV head.

    Where all devices belong to this process, it has all heads, and jitted functions take NumPy
    arrays as they are.

    Args:
      place: sharding of the arrays.
    """

    def __init__(self, place: jax.sharding.Sharding):
        self._place = place
        self._has_all = place.is_fully_addressable

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the own part of an array."""
        if self._has_all:
            return shape
        num_heads = sum(stop - start for start, stop in self._ranges(shape))
        return (*shape[:2], num_heads, *shape[3:])

    def nbytes(self, array: jax.Array) -> int:
        """Return the bytes of the own part of an array."""
        if self._has_all:
            return array.nbytes
        return int(np.prod(self.shape(array.shape))) * array.dtype.itemsize

    def to_host(self, array: jax.Array) -> np.ndarray:
        """Wait for an array, and return the own part of it."""
        if self._has_all:
            return np.asarray(array)
        parts = {shard.index[2].start or 0: shard.data for shard in array.addressable_shards}
        return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)], axis=2)

    def to_devices(
        self,
        values: Sequence[np.ndarray],
        like: Sequence[jax.Array],
        place: jax.sharding.Sharding | None = None,
    ) -> list[Any]:
        """Return arrays for a jitted function, of each of which `values` has the own part.

        Args:
          like: arrays with the numbers of KV heads of all processes.
          place: where to put the arrays; by default where those of `like` are.
        """
        if self._has_all:
            return list(values) if place is None else jax.device_put(list(values), place)
        place = place or self._place
        return [
            self._spread(part, whole.shape[2], place)
            for part, whole in zip(values, like, strict=True)
        ]

    def abstract(self, array: jax.ShapeDtypeStruct) -> Any:
        """Return what stands for an array of `to_devices` when an executable is prepared."""
        if self._has_all:
            return np.broadcast_to(np.zeros((), array.dtype), array.shape)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._place)

    def _spread(self, part: np.ndarray, num_heads: int, place: jax.sharding.Sharding) -> jax.Array:
        shape = (*part.shape[:2], num_heads, *part.shape[3:])
        ranges = self._ranges(shape)
        offsets = accumulate((stop - start for start, stop in ranges), initial=0)
        offset_of = dict(zip((start for start, _ in ranges), offsets, strict=False))

        def of_device(index: Any) -> np.ndarray:
            start, stop, _ = index[2].indices(num_heads)
            return part[:, :, offset_of[start] : offset_of[start] + stop - start]

        return jax.make_array_from_callback(shape, place, of_device)

    def _ranges(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return (first, end) of the KV heads of each own shard, in order, copies once."""
        found = self._place.addressable_devices_indices_map(shape).values()
        return sorted({index[2].indices(shape[2])[:2] for index in found if index is not None})
