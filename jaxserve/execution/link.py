"""Copies of KV pages from the page caches of one device group to those of another."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate
from math import gcd
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.execution.pages import PAGES_A_CALL, DevicePages, gathered, scattered
from jaxserve.memory.page_pool import NULL_PAGE
from jaxserve.models.batch import KVCache
from jaxserve.steps.step_function import Placement, StepFunction, abstract, unkept

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

    A piece is layers, KV heads of the target's cache, and the parts to cut them into.
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
    """Return `cache` with the pages of the joined pieces written to it."""
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
    """Yield each device of a placement that belongs to this process, and the index of its part."""
    shape = (1, 1, num_parts)
    for device, index in place.addressable_devices_indices_map(shape).items():
        assert index is not None
        yield device, index[2].start or 0


def copy_of_part(part: jax.Array, index: int) -> jax.Array:
    """Return the array of one device that holds the part with this index."""
    copies = part.addressable_shards
    return copies[index % len(copies)].data


def _with_heads(pages: jax.Array, num_heads: int) -> jax.Array:
    """Return pages [layers, pages, heads, ...] with fewer or more copies of each KV head."""
    common = gcd(pages.shape[2], num_heads)
    return jnp.repeat(pages[:, :, :: pages.shape[2] // common], num_heads // common, axis=2)


@final
@dataclass
class Parcel:
    """At most `PAGES_A_CALL` pages in transit to the target's devices; a dropped one has no id."""

    pages: list[int | None]
    pieces: tuple[tuple[Arrays, ...], ...]

    def drop(self, pages: Collection[int]) -> None:
        """Do not write these pages of the target."""
        self.pages = [None if page in pages else page for page in self.pages]

    def is_ready(self) -> bool:
        leaves: list[Any] = jax.tree.leaves(self.pieces)
        return all(leaf.is_ready() for leaf in leaves)


@final
class Link:
    """Sends pages from the caches of one device group to those of another.

    The groups may have different stages and tensor-parallel degrees. A page has the same number in
    every cache of both groups. Copies have a fixed number of pages, so that nothing compiles after
    `warm_up`.

    `send` gathers the pages into separate buffers, in the order of the source's steps, since later
    steps donate its caches. `receive` writes them to the target's caches, in the order of the
    target's steps. Call it when the pages have arrived: the target's later steps wait for it. Both
    groups' caches are in the order of their layers.
    """

    def __init__(self, source: Sequence[DevicePages], target: Sequence[DevicePages]):
        self._source = tuple(source)
        self._target = tuple(target)
        self._pieces = _common(_layers(source), _layers(target))
        self._take = [
            StepFunction(
                "taken",
                partial(gather_parts, pieces=tuple((p.layers, self._split(p)) for p in pieces)),
                unkept(pool.place),
                num_fixed=0,
                out_shardings=[self._gathered_to(p) for p in pieces],
            )
            for pool, pieces in zip(source, self._pieces, strict=True)
        ]
        self._put = [
            StepFunction(
                "put",
                scatter_pieces,
                unkept(pool.place),
                num_fixed=0,
                donate_argnums=0,
                out_shardings=pool.place,
            )
            for pool in target
        ]

    def send(self, pages: Sequence[int]) -> list[Parcel]:
        """Start to copy these pages; the caller may donate the source's caches afterwards."""
        return [
            self._send(pages[start : start + PAGES_A_CALL])
            for start in range(0, len(pages), PAGES_A_CALL)
        ]

    def receive(self, parcel: Parcel) -> None:
        """Write the pages of a parcel that were not dropped to the target's caches."""
        for pool, put, pieces in zip(self._target, self._put, parcel.pieces, strict=True):
            ids = np.full(PAGES_A_CALL, pool.num_pages, np.int32)  # an id past the end is skipped
            for i, page in enumerate(parcel.pages):
                if page is not None:
                    ids[i] = page
            with Placement.like(pool.place).in_force():
                pool.replace(put(pool.cache, ids, pieces))

    def warm_up(self) -> None:
        """Run every copy once; no page changes."""
        self.receive(self._send(()))

    def prepare(self) -> None:
        """Compile every copy without running it. The caches may have shapes only."""
        ids = np.zeros(PAGES_A_CALL, np.int32)
        arriving: list[list[Arrays]] = [[] for _ in self._target]
        for pool, take, pieces in zip(self._source, self._take, self._pieces, strict=True):
            taken = take.prepare(abstract(pool.cache), ids).out_info
            for piece, arrays in zip(pieces, taken, strict=True):
                place = self._target[piece.target].place
                arriving[piece.target].append(tuple(_arriving(parts, place) for parts in arrays))
        for pool, put, pieces in zip(self._target, self._put, arriving, strict=True):
            put.prepare(abstract(pool.cache), ids, tuple(pieces))

    def _send(self, pages: Sequence[int]) -> Parcel:
        ids = np.full(PAGES_A_CALL, NULL_PAGE, np.int32)
        ids[: len(pages)] = pages
        arrived: list[list[Arrays]] = [[] for _ in self._target]
        for pool, take, pieces in zip(self._source, self._take, self._pieces, strict=True):
            with Placement.like(pool.place).in_force():
                taken = take(pool.cache, ids)
            for piece, arrays in zip(pieces, taken, strict=True):
                arrived[piece.target].append(self._moved(piece, arrays))
        return Parcel(list(pages), tuple(map(tuple, arrived)))

    def _is_alike(self, piece: _Piece) -> bool:
        """Return whether both caches have equal shards, so that each shard moves as a whole."""
        pools = self._source[piece.source], self._target[piece.target]
        first, second = (Placement.like(pool.place).num_shards for pool in pools)
        return first == second

    def _split(self, piece: _Piece) -> tuple[int, int]:
        """Return the KV heads of the target's cache, and the number of parts (1 if not split)."""
        target = self._target[piece.target]
        num_shards = Placement.like(target.place).num_shards
        return _num_heads(target), 1 if self._is_alike(piece) else num_shards

    def _gathered_to(self, piece: _Piece) -> jax.sharding.Sharding:
        place = Placement.like(self._source[piece.source].place)
        return place.pages if self._is_alike(piece) else place.whole

    def _moved(self, piece: _Piece, arrays: Sequence[Sequence[jax.Array]]) -> Arrays:
        """Move gathered pages to the target; each device gets only its own heads, directly."""
        place = self._target[piece.target].place
        if self._is_alike(piece):
            return tuple(jax.device_put([parts[0] for parts in arrays], place))
        return tuple(_sharded(parts, place) for parts in arrays)


@final
@dataclass(frozen=True)
class _Piece:
    """Layers, by index in the source's cache, that a source and a target cache have in common."""

    source: int
    target: int
    layers: range


def _common(source: Sequence[range], target: Sequence[range]) -> list[list[_Piece]]:
    return [
        [
            _Piece(i, j, range(first - mine.start, last - mine.start))
            for j, theirs in enumerate(target)
            if (first := max(mine.start, theirs.start)) < (last := min(mine.stop, theirs.stop))
        ]
        for i, mine in enumerate(source)
    ]


def _layers(pools: Sequence[DevicePages]) -> list[range]:
    counts = [sum(leaf.shape[0] for leaf in pool.cache.k_pages) for pool in pools]
    ends = accumulate(counts)
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def _num_heads(pool: DevicePages) -> int:
    return pool.cache.k_pages[0].shape[2]


def _sharded(parts: Sequence[jax.Array], place: jax.sharding.Sharding) -> jax.Array:
    """Return an array whose shards on axis 2 are `parts`; each source has a copy of them."""
    mine = list(own_parts(place, len(parts)))
    shards = [copy_of_part(parts[index], index) for _, index in mine]
    moved = jax.device_put(shards, [device for device, _ in mine])
    shape = joined_shape(parts[0], len(parts))
    return jax.make_array_from_single_device_arrays(shape, place, moved)


def _arriving(parts: Sequence[Any], place: jax.sharding.Sharding) -> Any:
    """Return the shape of the joined parts, which are split by KV head, on the target."""
    shape = joined_shape(parts[0], len(parts))
    return jax.ShapeDtypeStruct(shape, parts[0].dtype, sharding=place)
