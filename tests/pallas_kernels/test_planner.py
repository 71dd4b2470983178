"""Work items cover the rows' queries and keys exactly once, in the guaranteed order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.kernels.paged_attention.planner import Capacity, Launches, Plan, Tiling, plan
from tests.common.tiers import some

pytestmark = pytest.mark.fast

# A small device, so that small batches have every kind of item.
TILING = Tiling(
    kv_heads=2,
    group=2,
    split_rows=4,
    tile_rows=8,
    split_keys=8,
    launches=Launches(block_keys=4),
    split_programs=12,
    tile_programs=12,
)


@pytest.mark.parametrize("seed", some(range(20), 0, 1, 2))
def test_every_query_meets_every_key_once(seed):
    """In a hundred random batches per seed, each allowed pair of query and key is in one item."""
    random = np.random.default_rng(seed)
    for _ in range(100):
        tiling, rows, window = _random_batch(random)
        capacity = _capacity(tiling, rows)
        made = plan(tiling, capacity, **rows, sliding_window=window)
        np.testing.assert_array_equal(_pairs(made, rows, window), _allowed(rows, window))
        _check_partials(made, capacity)


def test_programs_share_the_work():
    """No program has more work than the mean plus the longest item; the longest come first."""
    random = np.random.default_rng(0)
    tiling = replace(TILING, split_programs=16)
    rows = _rows(random.integers(1, 3, 64), random.integers(3, 300, 64))
    made = plan(tiling, _capacity(tiling, rows), **rows)
    keys = _keys_of_items(made, rows)
    assert (np.diff(-(-keys // tiling.launches.block_keys)) <= 0).all()
    programs = np.zeros(tiling.split_grid)
    np.add.at(programs, np.arange(len(keys)) % tiling.split_grid, keys)
    assert programs.max() <= programs.mean() + keys.max()


def test_few_rows_are_split_and_many_are_not():
    """One long row is split over the whole device; enough rows need no merge."""
    tiling = replace(TILING, split_programs=64)
    alone = _rows(np.asarray([1]), np.asarray([1000]))
    made = plan(tiling, _capacity(tiling, alone), **alone)
    assert made.counts[1] >= tiling.split_grid and made.counts[2] == 1
    crowd = _rows(np.ones(64, int), np.full(64, 1000))
    made = plan(tiling, _capacity(tiling, crowd), **crowd)
    assert made.counts.tolist() == [0, 64, 0]


def test_splits_begin_at_fixed_positions():
    """An item's splits begin at multiples of a split's number of keys, in any batch."""
    random = np.random.default_rng(1)
    long = (1, 777)
    for others in range(12):
        lengths = np.asarray([long[0], *random.integers(1, 3, others)])
        contexts = np.asarray([long[1], *random.integers(3, 900, others)])
        rows = _rows(lengths, contexts)
        made = plan(TILING, _capacity(TILING, rows), **rows)
        mine = made.splits[: made.counts[1]]
        mine = mine[mine[:, 0] == 0]
        covered = sorted(split for item in mine for split in range(item[3], item[4]))
        assert covered == list(range(-(-long[1] // TILING.split_keys)))


def test_which_kernel_serves_a_row_depends_on_the_row_alone():
    """Long rows go to the tile kernel; short rows, also after long contexts, do not."""
    tiling = Tiling(kv_heads=8, group=4, split_rows=16, tile_rows=64)
    rows = _rows(np.asarray([1, 4, 5, 40, 700]), np.asarray([9000, 4, 5, 9000, 9000]))
    made = plan(tiling, _capacity(tiling, rows), **rows)
    assert set(made.tiles[: made.counts[0], 0]) == {2, 4}
    assert set(made.splits[: made.counts[1], 0]) == {0, 1, 3}


def test_a_batch_over_the_capacity_is_refused():
    """A plan that would not fit raises instead of dropping work."""
    rows = _rows(np.ones(5, int), np.full(5, 9))
    capacity = replace(_capacity(TILING, rows), splits=4)
    with pytest.raises(ValueError, match="5 splits are more than the plan's capacity of 4"):
        plan(TILING, capacity, **rows)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(group=5),
        dict(tile_rows=2),
        dict(launches=Launches(block_keys=3)),
        dict(float32_launches=Launches(block_keys=16)),
        dict(split_keys=6),
    ],
)
def test_tilings_that_contradict_themselves(wrong):
    """Sizes that are not multiples of each other are refused where they are defined."""
    with pytest.raises(ValueError, match="expected each|pass a multiple"):
        replace(TILING, **wrong)


def _rows(lengths: np.ndarray, contexts: np.ndarray) -> dict[str, np.ndarray]:
    """Return rows whose queries are the last ones of their contexts."""
    return dict(
        query_length=lengths,
        first_position=np.maximum(contexts - lengths, 0),
        context_length=contexts,
    )


def _random_batch(random: np.random.Generator):
    group = int(random.choice([1, 2, 3, 4]))
    tiling = replace(
        TILING,
        group=group,
        split_rows=int(random.choice([4, 8])),
        tile_rows=int(random.choice([8, 16])),
        split_programs=int(random.choice([2, 8, 64])),
    )
    count = int(random.integers(0, 12))
    kinds = random.integers(0, 4, count)
    lengths = np.choose(kinds, [np.zeros(count, int), 1, 2, 3]) * random.integers(1, 20, count)
    lengths = np.where(kinds == 1, 1, lengths)
    rows = _rows(lengths, lengths + random.integers(0, 120, count))
    # Some rows are a range inside a sequence, and some queries are past the context.
    rows["context_length"] = np.maximum(rows["context_length"] + random.integers(-9, 30, count), 0)
    window = None if random.random() < 0.5 else int(random.integers(1, 60))
    return tiling, rows, window


def _capacity(tiling: Tiling, rows: dict[str, np.ndarray]) -> Capacity:
    lengths = rows["query_length"]
    return Capacity.of(
        tiling,
        num_tokens=int(lengths.sum()),
        num_rows=len(lengths),
        max_context=int(rows["context_length"].max(initial=1)),
        is_decode=bool((lengths <= 1).all()),
    )


def _allowed(rows: dict[str, np.ndarray], window: int | None) -> np.ndarray:
    """Return the pairs that may attend, [rows, queries, keys]."""
    shape = _shape(rows)
    query, key = np.ogrid[: shape[1], : shape[2]]
    position = rows["first_position"][:, None, None] + query
    seen = (query < rows["query_length"][:, None, None]) & (key <= position)
    seen &= key < rows["context_length"][:, None, None]
    return seen if window is None else seen & (key > position - window)


def _shape(rows: dict[str, np.ndarray]) -> tuple[int, int, int]:
    lengths, contexts = rows["query_length"], rows["context_length"]
    return len(lengths), int(lengths.max(initial=0)), int(contexts.max(initial=0))


def _pairs(made: Plan, rows: dict[str, np.ndarray], window: int | None) -> np.ndarray:
    """Return how often each pair is computed, masked as in the kernels."""
    times = np.zeros(_shape(rows), int)
    for row, first, count in made.tiles[: made.counts[0]]:
        times[row, first : first + count] += 1
    for row, first, count, begin, end, _ in made.splits[: made.counts[1]]:
        keys = slice(begin * TILING.split_keys, end * TILING.split_keys)
        times[row, first : first + count, keys] += 1
    return times * _allowed(rows, window)


def _keys_of_items(made: Plan, rows: dict[str, np.ndarray]) -> np.ndarray:
    items = made.splits[: made.counts[1]]
    last = rows["first_position"][items[:, 0]] + items[:, 1] + items[:, 2]
    end = np.minimum(items[:, 4] * TILING.split_keys, last)
    return end - items[:, 3] * TILING.split_keys


def _check_partials(made: Plan, capacity: Capacity) -> None:
    """Check that each merged partial result is written once, by the item of its queries."""
    written = np.zeros(capacity.partials, int)
    owner = {}
    for row, first, count, begin, end, partial in made.splits[: made.counts[1]]:
        if partial >= 0:
            written[partial : partial + end - begin] += 1
            owner.update({partial + i: (row, first, count, begin + i) for i in range(end - begin)})
    merged = np.zeros(capacity.partials, int)
    for row, first, count, partial, num in made.merges[: made.counts[2]]:
        merged[partial : partial + num] += 1
        splits = [owner[partial + i] for i in range(num)]
        assert {split[:3] for split in splits} == {(row, first, count)}
        assert [split[3] for split in splits] == list(range(splits[0][3], splits[0][3] + num))
    np.testing.assert_array_equal(written, merged)
    assert written.max(initial=0) <= 1
