"""Which program of a GPU computes what: rows of a ragged batch cut into work items. NumPy only.

Two kernels share a batch. The *tile* kernel takes long rows, a tile of queries at a time over all
the keys that they see. The *split* kernel takes rows of few queries, whose keys alone can fill the
chip. It goes through chunks of keys whose boundaries are fixed positions; each chunk is reduced by
itself and then merged with those before it, in their order: in the kernel where one item has all
chunks of its queries, by the *merge* kernel where several items share them. So the bits of a row's
output depend neither on the split nor on the rest of the batch, and the split is free to follow
both (Flash-decoding, with the reduction order of a fixed split).

Programs are persistent: program p of P takes the items p, p + P, p + 2 P and so on of a list with
the longest first, so that no program has more than the mean and the longest item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

# A merge's cost and an item's, in the time that a program takes for one block of keys.
_MERGE_COST = 1.5
_ITEM_COST = 0.5
_SLOT_COST = 0.5
# Rows with fewer keys than this, and too few tiles to fill the chip, are not worth splitting.
_MIN_SPLIT_KEYS = 2048


@final
@dataclass(frozen=True)
class Launch:
    """How a kernel is compiled: warps a program, and iterations of its loop under way at once."""

    num_warps: int
    num_stages: int


@final
@dataclass(frozen=True, kw_only=True)
class Launches:
    """How Triton compiles its kernels.

    Attributes:
      block_keys: keys that a kernel takes at a time.
    """

    block_keys: int = 64
    tile: Launch = Launch(num_warps=4, num_stages=3)
    split: Launch = Launch(num_warps=4, num_stages=3)
    merge: Launch = Launch(num_warps=1, num_stages=1)


@final
@dataclass(frozen=True, kw_only=True)
class Warpgroups:
    """How Mosaic's tile kernel goes through keys; two warpgroups share a tile's queries.

    Attributes:
      block_keys: keys that they take at a time.
      num_stages: blocks of keys, and of values, in shared memory at once.
    """

    NUM = 2

    block_keys: int
    num_stages: int


@final
@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How the kernels cut the work; static, of a model's heads on a device.

    Attributes:
      kv_heads: of the cache, on one device.
      group: query heads a KV head.
      split_rows, tile_rows: rows of the matrix products: queries times group, and padding.
      chunk_keys: of the split kernel; a multiple of the keys that any kernel takes at a time.
      split_programs, tile_programs: that the device runs at once, over all KV heads.
      launches: of Triton's kernels.
      masked_launches, float32_launches: likewise with ALiBi, or a window and a soft cap together,
        and for queries in float32, which take more registers; None for the same.
      warpgroups: of Mosaic's tile kernel; None for tiles that are not made for it.
    """

    kv_heads: int
    group: int
    split_rows: int
    tile_rows: int
    chunk_keys: int = 512
    split_programs: int = 264
    tile_programs: int = 264
    launches: Launches = Launches()
    masked_launches: Launches | None = None
    float32_launches: Launches | None = None
    warpgroups: Warpgroups | None = None

    def __post_init__(self) -> None:
        if not self.group <= self.split_rows <= self.tile_rows:
            raise ValueError(
                f"group={self.group}, split_rows={self.split_rows}, tile_rows={self.tile_rows}: "
                "expected each to be at most the next"
            )
        for launches in (self.launches, self.masked_launches, self.float32_launches):
            if launches is not None and self.chunk_keys % launches.block_keys:
                raise ValueError(
                    f"chunk_keys={self.chunk_keys} is not a multiple of "
                    f"block_keys={launches.block_keys}"
                )

    def check_heads(self, q_heads: int, kv_heads: int) -> None:
        """Raise ValueError if it is for other heads."""
        if (self.kv_heads, self.group) != (kv_heads, q_heads // kv_heads):
            raise ValueError(
                f"the plan is for {self.kv_heads} KV heads in groups of {self.group}, but the call "
                f"has {q_heads} query heads and {kv_heads} KV heads"
            )

    def launches_for(
        self, dtype: Any, *, has_alibi: bool, has_window: bool, has_cap: bool
    ) -> Launches:
        """Of Triton's kernels, for a dtype of queries."""
        if np.dtype(dtype) == np.float32:
            return self.float32_launches or self.launches
        is_masked = has_alibi or (has_window and has_cap)
        return (self.masked_launches if is_masked else None) or self.launches

    @property
    def split_queries(self) -> int:
        """Queries of an item of the split kernel, at most."""
        return self.split_rows // self.group

    @property
    def tile_queries(self) -> int:
        """Queries of an item of the tile kernel, at most; no warpgroup has part of one."""
        shares = 1 if self.warpgroups is None else Warpgroups.NUM
        return self.tile_rows // shares // self.group * shares

    @property
    def split_grid(self) -> int:
        """Programs a KV head of the split kernel."""
        return max(1, self.split_programs // self.kv_heads)

    @property
    def tile_grid(self) -> int:
        """Programs a KV head of the tile kernel."""
        return max(1, self.tile_programs // self.kv_heads)


@final
@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Static sizes of a plan's arrays: most items of each kernel, merges, and partial results."""

    tiles: int
    splits: int
    merges: int
    slots: int

    @classmethod
    def of(
        cls, tiling: Tiling, *, num_tokens: int, num_rows: int, max_context: int, is_decode: bool
    ) -> Capacity:
        """Enough for any batch of so many queries in so many rows, one in each to decode."""
        rows = min(num_rows, num_tokens)
        # A row's last item of either kernel may be short.
        tiles = 0 if is_decode else num_tokens // tiling.tile_queries + rows
        runs = rows if is_decode else num_tokens // tiling.split_queries + rows
        chunks = -(-max_context // tiling.chunk_keys)
        slots = max(chunks, 16 * tiling.split_grid)
        return cls(tiles=tiles, splits=runs + slots, merges=min(runs, slots // 2), slots=slots)


@final
@dataclass(frozen=True, kw_only=True)
class Plan:
    """Work items of a batch: int32 arrays of a capacity's sizes, and how much of them is used.

    `row` indexes the batch's rows, `query` a row's queries, `slot` the partial results.

    Attributes:
      tiles: [tiles, 3] of row, first query, number of queries; longest first.
      splits: [splits, 6] of row, first query, number of queries, first chunk, end chunk, slot;
        longest first. The slot is that of the first chunk, others follow; -1 for an item with all
        chunks of its queries, which writes the output itself.
      merges: [merges, 5] of row, first query, number of queries, first slot, number of slots.
      counts: [3] of tiles, splits and merges used.
      num_slots: that there have to be.
    """

    tiling: Tiling
    num_slots: int
    tiles: Any
    splits: Any
    merges: Any
    counts: Any


def no_work(tiling: Tiling, capacity: Capacity) -> Plan:
    """The plan of a batch without rows."""
    nothing = np.zeros(0, np.int32)
    return plan(
        *(tiling, capacity),
        query_length=nothing,
        first_position=nothing,
        context_length=nothing,
    )


def plan(
    tiling: Tiling,
    capacity: Capacity,
    *,
    query_length: np.ndarray,
    first_position: np.ndarray,
    context_length: np.ndarray,
    sliding_window: int | None = None,
) -> Plan:
    """Cut rows (int [rows] each, as `Rows` has them) into work items.

    The kernels read lengths from the rows again: contexts may be shorter by then, for a decode loop
    planned at its last iteration, and rows may have gone. Under a sliding window, leaving it out
    costs balance and nothing else.

    Raises:
      ValueError: the batch is larger than the capacity.
    """
    length = np.asarray(query_length, np.int64)
    first = np.asarray(first_position, np.int64)
    context = np.asarray(context_length, np.int64)
    is_tiled = _is_tiled(tiling, length, context)
    tiles = _Queries.of(length, first, context, sliding_window, is_tiled, tiling.tile_queries)
    few = _Queries.of(length, first, context, sliding_window, ~is_tiled, tiling.split_queries)
    longest_first = np.argsort(-(tiles.end - tiles.begin), kind="stable")
    splits, merges = _best_split(tiling, capacity, few)
    return Plan(
        tiling=tiling,
        num_slots=capacity.slots,
        tiles=_padded(tiles.columns()[longest_first], capacity.tiles, "tiles"),
        splits=_padded(splits, capacity.splits, "splits"),
        merges=_padded(merges, capacity.merges, "merges"),
        counts=np.asarray([len(tiles.row), len(splits), len(merges)], np.int32),
    )


def _is_tiled(tiling: Tiling, length: np.ndarray, context: np.ndarray) -> np.ndarray:
    """Which rows the tile kernel takes; by the row and the device alone, for bits depend on it."""
    num_tiles = -(-length // tiling.tile_queries) * tiling.kv_heads
    fills = 2 * num_tiles >= tiling.tile_programs
    return (length > tiling.split_queries) & (fills | (context < _MIN_SPLIT_KEYS))


@final
@dataclass(frozen=True)
class _Queries:
    """Runs of queries and the keys that they see, int64 [runs] each."""

    row: np.ndarray
    first: np.ndarray
    count: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @classmethod
    def of(
        cls,
        length: np.ndarray,
        first_position: np.ndarray,
        context: np.ndarray,
        sliding_window: int | None,
        chosen: np.ndarray,
        most: int,
    ) -> _Queries:
        """The chosen rows' queries, at most so many together."""
        runs = np.where(chosen, -(-length // most), 0)
        row = np.repeat(np.arange(len(length)), runs)
        first = (np.arange(len(row)) - np.repeat(np.cumsum(runs) - runs, runs)) * most
        count = np.minimum(most, length[row] - first)
        position = first_position[row] + first
        end = np.clip(position + count, 0, np.maximum(context[row], 0))
        begin = np.zeros_like(end)
        if sliding_window is not None:
            begin = np.clip(position - sliding_window + 1, 0, end)
        return cls(row, first, count, begin, end)

    def columns(self) -> np.ndarray:
        return np.stack([self.row, self.first, self.count], axis=1)


def _best_split(
    tiling: Tiling, capacity: Capacity, queries: _Queries
) -> tuple[np.ndarray, np.ndarray]:
    """Items and merges of the split that should end first, of those that fit."""
    begin = queries.begin // tiling.chunk_keys
    end = np.maximum(-(-queries.end // tiling.chunk_keys), begin + 1)
    num_chunks = end - begin
    best, best_cost = None, np.inf
    most = int(num_chunks.max(initial=1))
    # Chunks of an item: all first, then ever fewer.
    for size in (most, *(1 << power for power in reversed(range((most - 1).bit_length())))):
        num_slots = int(num_chunks[num_chunks > size].sum())
        if num_slots > capacity.slots:
            break
        split = _split(tiling, queries, begin, end, size)
        cost = _cost(tiling, split, num_slots)
        if cost < best_cost:
            best, best_cost = split, cost
    assert best is not None
    return best.items, best.merges


@final
@dataclass(frozen=True)
class _Split:
    items: np.ndarray
    costs: np.ndarray
    merges: np.ndarray


def _split(
    tiling: Tiling, queries: _Queries, begin: np.ndarray, end: np.ndarray, size: int
) -> _Split:
    """Runs with more than `size` chunks are cut into items of so many; the others are direct."""
    num_chunks = end - begin
    is_shared = num_chunks > size
    slots = np.where(is_shared, num_chunks, 0)
    first_slot = np.where(is_shared, np.cumsum(slots) - slots, -1)
    num_items = np.where(is_shared, -(-num_chunks // size), 1)
    run = np.repeat(np.arange(len(begin)), num_items)
    skipped = (np.arange(len(run)) - np.repeat(np.cumsum(num_items) - num_items, num_items)) * size
    first_chunk = begin[run] + skipped
    end_chunk = np.where(is_shared[run], np.minimum(first_chunk + size, end[run]), end[run])
    slot = np.where(is_shared[run], first_slot[run] + skipped, -1)
    keys = np.minimum(end_chunk * tiling.chunk_keys, queries.end[run]) - np.maximum(
        first_chunk * tiling.chunk_keys, queries.begin[run]
    )
    costs = _ITEM_COST + -(-keys // tiling.launches.block_keys)
    costs = costs + _SLOT_COST * np.where(is_shared[run], end_chunk - first_chunk, 0)
    order = np.argsort(-costs, kind="stable")
    columns = (queries.row[run], queries.first[run], queries.count[run])
    items = np.stack([*columns, first_chunk, end_chunk, slot], axis=1)
    merged = np.stack([queries.row, queries.first, queries.count, first_slot, slots], axis=1)
    return _Split(items[order], costs[order], merged[is_shared])


def _cost(tiling: Tiling, split: _Split, num_slots: int) -> float:
    """Time until the last program is done, in blocks of keys."""
    programs = tiling.split_grid
    padded = np.pad(split.costs, (0, -len(split.costs) % programs))
    slowest = padded.reshape(-1, programs).sum(axis=0).max(initial=0.0)
    return slowest + (_MERGE_COST + _SLOT_COST * num_slots / programs if num_slots else 0.0)


def _padded(rows: np.ndarray, size: int, name: str) -> np.ndarray:
    if len(rows) > size:
        raise ValueError(f"{len(rows)} {name}, more than the plan's capacity of {size}")
    return np.pad(rows, ((0, size - len(rows)), (0, 0))).astype(np.int32)
