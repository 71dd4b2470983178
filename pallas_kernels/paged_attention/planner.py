"""Work items of the GPU kernels, cut from the rows of a ragged batch. NumPy only.

Two kernels share a batch. The *tile* kernel takes long rows, one tile of queries at a time over all
the keys that they see. The *split* kernel takes rows of few queries, whose keys alone can fill the
device. A split is a range of `Tiling.split_keys` keys between fixed positions. Each split is
reduced by itself and then merged with the splits before it, in order: by the split kernel if one
item has all splits of its queries, by the *merge* kernel if several items share them. So the bits
of a row's output depend neither on how splits are assigned to items nor on the rest of the batch
(Flash-decoding, with the reduction order of a fixed split).

Programs are persistent: program p of P takes the items p, p + P, p + 2 P and so on of a list with
the longest first, so that no program has more work than the mean plus the longest item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from jaxtyping import Bool, Float, Int, Int32

# Costs of a merge, an item and a partial result, in units of a program's time for a block of keys.
_MERGE_COST = 1.5
_ITEM_COST = 0.5
_PARTIAL_COST = 0.5
# Rows with fewer keys than this are not split, even if their tiles do not fill the device.
_MIN_SPLIT_KEYS = 2048


@final
@dataclass(frozen=True)
class Launch:
    """The compilation of a kernel: warps per program, and loop iterations in flight."""

    num_warps: int
    num_stages: int


@final
@dataclass(frozen=True, kw_only=True)
class Launches:
    """The compilation of the Triton kernels, with `block_keys` keys per loop iteration."""

    block_keys: int = 64
    tile: Launch = Launch(num_warps=4, num_stages=3)
    split: Launch = Launch(num_warps=4, num_stages=3)
    merge: Launch = Launch(num_warps=1, num_stages=1)


@final
@dataclass(frozen=True, kw_only=True)
class Warpgroups:
    """The loops of Mosaic's kernels over keys; two warpgroups share a tile's queries.

    An iteration has `block_keys` keys (tile kernel) or `split_block_keys` (split kernel). Shared
    memory has `num_stages` or `split_stages` blocks of keys, and as many of values.
    """

    NUM = 2

    block_keys: int
    num_stages: int
    split_block_keys: int = 64
    split_stages: int = 3


@final
@dataclass(frozen=True, kw_only=True)
class Tiling:
    """The static sizes by which the kernels cut the work, for a model's heads on a device.

    Attributes:
      kv_heads: KV heads of the cache on one device.
      group: query heads per KV head.
      split_rows, tile_rows: rows of the matrix products: queries times group, then padding.
      split_keys: keys of a split; a multiple of `block_keys` of all launches.
      split_programs, tile_programs: programs that the device runs at once, over all KV heads.
      launches: the compilation of the Triton kernels.
      masked_launches: used with ALiBi, or with a sliding window and a soft cap together; None for
        `launches`. These take more registers.
      float32_launches: used for float32 queries; None for `launches`.
      warpgroups: the loops of Mosaic's kernels; None for tiles of the Triton kernel.
      chunk_invariant: the split kernel takes all rows; a query has the same bits in any chunk.
    """

    kv_heads: int
    group: int
    split_rows: int
    tile_rows: int
    split_keys: int = 512
    split_programs: int = 264
    tile_programs: int = 264
    launches: Launches = Launches()
    masked_launches: Launches | None = None
    float32_launches: Launches | None = None
    warpgroups: Warpgroups | None = None
    chunk_invariant: bool = False

    def __post_init__(self) -> None:
        if not self.group <= self.split_rows <= self.tile_rows:
            raise ValueError(
                f"group={self.group}, split_rows={self.split_rows} and tile_rows={self.tile_rows} "
                "are not allowed; expected each to be at most the next"
            )
        for launches in (self.launches, self.masked_launches, self.float32_launches):
            if launches is not None and self.split_keys % launches.block_keys:
                raise ValueError(
                    f"split_keys={self.split_keys} is not allowed; pass a multiple of "
                    f"block_keys={launches.block_keys}"
                )

    def check_heads(self, q_heads: int, kv_heads: int) -> None:
        """Raise ValueError if the tiling is for other numbers of heads."""
        if (self.kv_heads, self.group) != (kv_heads, q_heads // kv_heads):
            raise ValueError(
                f"the plan is for {self.kv_heads} KV heads in groups of {self.group}, but the call "
                f"has {q_heads} query heads and {kv_heads} KV heads; plan with this call's heads"
            )

    def launches_for(
        self, dtype: Any, *, has_alibi: bool, has_window: bool, has_cap: bool
    ) -> Launches:
        """Return the compilation of the Triton kernels for queries of a dtype and these options."""
        if np.dtype(dtype) == np.float32:
            return self.float32_launches or self.launches
        is_masked = has_alibi or (has_window and has_cap)
        return (self.masked_launches if is_masked else None) or self.launches

    @property
    def split_queries(self) -> int:
        """Maximum number of queries of an item of the split kernel."""
        return self.split_rows // self.group

    @property
    def tile_queries(self) -> int:
        """Maximum number of queries of an item of the tile kernel; warpgroups share whole ones."""
        shares = 1 if self.warpgroups is None else Warpgroups.NUM
        return self.tile_rows // shares // self.group * shares

    @property
    def split_grid(self) -> int:
        """Programs of the split kernel per KV head."""
        return max(1, self.split_programs // self.kv_heads)

    @property
    def tile_grid(self) -> int:
        """Programs of the tile kernel per KV head."""
        return max(1, self.tile_programs // self.kv_heads)


@final
@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Static sizes of a plan's arrays: maximum numbers of items and of partial results."""

    tiles: int
    splits: int
    merges: int
    partials: int

    @classmethod
    def of(
        cls, tiling: Tiling, *, num_tokens: int, num_rows: int, max_context: int, is_decode: bool
    ) -> Capacity:
        """Return a capacity for any batch of `num_tokens` queries in at most `num_rows` rows.

        Contexts have up to `max_context` tokens; with `is_decode`, every row has one query.
        """
        rows = min(num_rows, num_tokens)
        # A row's last item of either kernel may be short.
        no_tiles = is_decode or tiling.chunk_invariant
        tiles = 0 if no_tiles else num_tokens // tiling.tile_queries + rows
        runs = rows if is_decode else num_tokens // tiling.split_queries + rows
        most = 256 // tiling.split_rows if tiling.chunk_invariant else 16  # taller ones are larger
        partials = max(-(-max_context // tiling.split_keys), most * tiling.split_grid)
        return cls(
            tiles=tiles, splits=runs + partials, merges=min(runs, partials // 2), partials=partials
        )


@final
@dataclass(frozen=True, kw_only=True)
class Plan:
    """The work items of a batch, in int32 arrays of a capacity's sizes.

    An item's columns are indices of a row of the batch, of a query of the row, of a split of its
    keys, and of a partial result.

    Attributes:
      tiles: items of the tile kernel: row, first query, number of queries; longest first.
      splits: items of the split kernel: row, first query, number of queries, first split, end
        split, partial result; longest first. The partial result is the first split's, and the
        others' follow; -1 for an item with all splits of its queries, which writes the output.
      merges: items of the merge kernel: row, first query, number of queries, first partial
        result, number of partial results.
      counts: numbers of items in `tiles`, `splits` and `merges`.
      num_partials: size of the arrays of partial results.
    """

    tiling: Tiling
    num_partials: int
    tiles: Int32[Any, "tiles 3"]
    splits: Int32[Any, "splits 6"]
    merges: Int32[Any, "merges 5"]
    counts: Int32[Any, " 3"]


def no_work(tiling: Tiling, capacity: Capacity) -> Plan:
    nothing = np.zeros(0, np.int32)
    return plan(
        tiling, capacity, query_length=nothing, first_position=nothing, context_length=nothing
    )


def plan(
    tiling: Tiling,
    capacity: Capacity,
    *,
    query_length: Int[np.ndarray, " rows"],
    first_position: Int[np.ndarray, " rows"],
    context_length: Int[np.ndarray, " rows"],
    sliding_window: int | None = None,
) -> Plan:
    """Cut rows into work items.

    The kernels read the lengths from the rows again. By then contexts may be shorter, as in a
    decode loop that is planned for its last iteration, and rows may have ended.

    Args:
      query_length, first_position, context_length: see `Rows`.
      sliding_window: used to balance the work; None is correct for any model.

    Raises:
      ValueError: the batch is larger than the capacity.
    """
    length = np.asarray(query_length, np.int64)
    first = np.asarray(first_position, np.int64)
    context = np.asarray(context_length, np.int64)
    is_tiled = _is_tiled(tiling, length, context)
    tiles = _Runs.of(length, first, context, sliding_window, is_tiled, tiling.tile_queries)
    few = _Runs.of(length, first, context, sliding_window, ~is_tiled, tiling.split_queries)
    longest_first = np.argsort(-(tiles.end - tiles.begin), kind="stable")
    splits, merges = _best_items(tiling, capacity, few)
    return Plan(
        tiling=tiling,
        num_partials=capacity.partials,
        tiles=_padded(tiles.columns()[longest_first], capacity.tiles, "tiles"),
        splits=_padded(splits, capacity.splits, "splits"),
        merges=_padded(merges, capacity.merges, "merges"),
        counts=np.asarray([len(tiles.row), len(splits), len(merges)], np.int32),
    )


def _is_tiled(
    tiling: Tiling, length: Int[np.ndarray, " rows"], context: Int[np.ndarray, " rows"]
) -> Bool[np.ndarray, " rows"]:
    """Return which rows the tile kernel takes.

    It depends on the row and the device only, as the bits of a row's output depend on it.
    """
    num_tiles = -(-length // tiling.tile_queries) * tiling.kv_heads
    fills = 2 * num_tiles >= tiling.tile_programs
    may = (length > tiling.split_queries) & (not tiling.chunk_invariant)
    return may & (fills | (context < _MIN_SPLIT_KEYS))


@final
@dataclass(frozen=True)
class _Runs:
    """Runs of queries, and the range of keys that each run sees."""

    row: Int[np.ndarray, " runs"]
    first: Int[np.ndarray, " runs"]
    count: Int[np.ndarray, " runs"]
    begin: Int[np.ndarray, " runs"]
    end: Int[np.ndarray, " runs"]

    @classmethod
    def of(
        cls,
        length: Int[np.ndarray, " rows"],
        first_position: Int[np.ndarray, " rows"],
        context: Int[np.ndarray, " rows"],
        sliding_window: int | None,
        chosen: Bool[np.ndarray, " rows"],
        most: int,
    ) -> _Runs:
        """Return the queries of the chosen rows, in runs of at most `most`."""
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

    def columns(self) -> Int[np.ndarray, "runs 3"]:
        return np.stack([self.row, self.first, self.count], axis=1)


def _best_items(
    tiling: Tiling, capacity: Capacity, queries: _Runs
) -> tuple[Int[np.ndarray, "items 6"], Int[np.ndarray, "merges 5"]]:
    """Return the items and merges with the earliest estimated end, of those that fit."""
    begin = queries.begin // tiling.split_keys
    end = np.maximum(-(-queries.end // tiling.split_keys), begin + 1)
    num_splits = end - begin
    best, best_cost = None, np.inf
    most = int(num_splits.max(initial=1))
    # Splits per item: first all of them, then powers of two in decreasing order.
    for size in (most, *(1 << power for power in reversed(range((most - 1).bit_length())))):
        num_partials = int(num_splits[num_splits > size].sum())
        if num_partials > capacity.partials:
            break
        items = _items(tiling, queries, begin, end, size)
        cost = _cost(tiling, items, num_partials)
        if cost < best_cost:
            best, best_cost = items, cost
    assert best is not None
    return best.items, best.merges


@final
@dataclass(frozen=True)
class _Items:
    items: Int[np.ndarray, "items 6"]
    costs: Float[np.ndarray, " items"]
    merges: Int[np.ndarray, "merges 5"]


def _items(
    tiling: Tiling,
    queries: _Runs,
    begin: Int[np.ndarray, " runs"],
    end: Int[np.ndarray, " runs"],
    size: int,
) -> _Items:
    """Cut runs with more than `size` splits into items of at most `size`; others are one item."""
    num_splits = end - begin
    is_shared = num_splits > size
    partials = np.where(is_shared, num_splits, 0)
    first_partial = np.where(is_shared, np.cumsum(partials) - partials, -1)
    num_items = np.where(is_shared, -(-num_splits // size), 1)
    run = np.repeat(np.arange(len(begin)), num_items)
    skipped = (np.arange(len(run)) - np.repeat(np.cumsum(num_items) - num_items, num_items)) * size
    first_split = begin[run] + skipped
    end_split = np.where(is_shared[run], np.minimum(first_split + size, end[run]), end[run])
    partial = np.where(is_shared[run], first_partial[run] + skipped, -1)
    keys = np.minimum(end_split * tiling.split_keys, queries.end[run]) - np.maximum(
        first_split * tiling.split_keys, queries.begin[run]
    )
    costs = _ITEM_COST + -(-keys // tiling.launches.block_keys)
    costs = costs + _PARTIAL_COST * np.where(is_shared[run], end_split - first_split, 0)
    order = np.argsort(-costs, kind="stable")
    columns = (queries.row[run], queries.first[run], queries.count[run])
    items = np.stack([*columns, first_split, end_split, partial], axis=1)
    merged = np.stack([queries.row, queries.first, queries.count, first_partial, partials], axis=1)
    return _Items(items[order], costs[order], merged[is_shared])


def _cost(tiling: Tiling, items: _Items, num_partials: int) -> float:
    """Return the time until the last program ends, in blocks of keys."""
    programs = tiling.split_grid
    padded = np.pad(items.costs, (0, -len(items.costs) % programs))
    slowest = padded.reshape(-1, programs).sum(axis=0).max(initial=0.0)
    return slowest + (
        _MERGE_COST + _PARTIAL_COST * num_partials / programs if num_partials else 0.0
    )


def _padded(
    rows: Int[np.ndarray, "rows columns"], size: int, name: str
) -> Int32[np.ndarray, "size columns"]:
    if len(rows) > size:
        raise ValueError(
            f"{len(rows)} {name} are more than the plan's capacity of {size}; make a capacity for "
            "this batch"
        )
    return np.pad(rows, ((0, size - len(rows)), (0, 0))).astype(np.int32)
