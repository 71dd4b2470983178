"""KV pages in parts: as one device group gathers them for another one, and as that writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.execution.page_calls import gathered, scattered
from jaxserve.models.batch import KVCache

# The arrays of some layers: keys, values and, where there are scales, those of each:
# [layers, PAGES_A_CALL, kv_heads, ...].
Arrays = tuple[jax.Array, ...]


def gather_parts(
    cache: KVCache,
    ids: jax.Array,  # int32 [PAGES_A_CALL]
    *,
    pieces: Sequence[tuple[range, tuple[int, int]]],
) -> list[list[list[jax.Array]]]:
    """Return, for each piece and kind of array, the parts of the pages.

    Args:
      pieces: layers, KV heads of the target's cache, and the parts to cut them into.
    """
    pages = gathered(cache, ids)
    joined = [jnp.concatenate(leaves) for leaves in kinds(pages) if leaves]
    return [
        [
            jnp.split(_with_heads(leaf[layers.start : layers.stop], num_heads), num_parts, axis=2)
            for leaf in joined
        ]
        for layers, (num_heads, num_parts) in pieces
    ]


def scatter_pieces(
    cache: KVCache,
    ids: jax.Array,  # int32 [PAGES_A_CALL]; an id past the end is skipped
    pieces: Sequence[Arrays],
) -> KVCache:
    """Return `cache` with the pages written that the pieces make up."""
    joined = iter([jnp.concatenate(leaves) for leaves in zip(*pieces, strict=True)])
    values = []
    for leaves in kinds(cache):
        whole = next(joined) if leaves else None
        starts = np.cumsum([0, *(leaf.shape[0] for leaf in leaves)])
        values.append(
            tuple(
                whole[first:last]  # pyrefly: ignore[unsupported-operation]
                for first, last in zip(starts, starts[1:], strict=False)
            )
        )
    return scattered(cache, ids, KVCache(*values))  # pyrefly: ignore[bad-argument-type]


def kinds(cache: KVCache) -> list[tuple[jax.Array, ...]]:
    """Return the buffers of each kind of array of a cache; a kind that it lacks has none."""
    return [getattr(cache, field.name) for field in fields(cache)]


def joined_shape(part: Any, num_parts: int) -> tuple[int, ...]:
    """Return the shape of an array that is cut by KV head into parts with the shape of `part`."""
    layers, pages, heads, *rest = part.shape
    return (layers, pages, heads * num_parts, *rest)


def own_parts(place: jax.sharding.Sharding, num_parts: int) -> Iterator[tuple[Any, int]]:
    """Yield each device of a placement that is this process's, and the index of its part."""
    shape = (1, 1, num_parts)
    for device, index in place.addressable_devices_indices_map(shape).items():
        assert index is not None
        yield device, index[2].start or 0


def copy_of_part(part: jax.Array, index: int) -> jax.Array:
    """Return the array of one device that holds a part of this index, one device for each."""
    copies = part.addressable_shards
    return copies[index % len(copies)].data


def _with_heads(pages: jax.Array, num_heads: int) -> jax.Array:
    """Return pages [layers, pages, heads, ...] with fewer or more copies of each KV head."""
    common = gcd(pages.shape[2], num_heads)
    return jnp.repeat(pages[:, :, :: pages.shape[2] // common], num_heads // common, axis=2)
