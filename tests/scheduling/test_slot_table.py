"""Slots are allocated close together and compacted with the fewest moves."""

import itertools
import random

import pytest

from jaxserve.scheduling.queues import SlotTable, fewest_moves_window
from tests.common.tiers import seeds


def test_window_needs_the_fewest_moves():
    """For every pattern of nine slots, no other window needs fewer moves."""
    for live in itertools.product([False, True], repeat=9):
        for size in range(max(1, sum(live)), 10):
            start = fewest_moves_window(live, size)
            best = max(sum(live[s : s + size]) for s in range(len(live) - size + 1))
            assert sum(live[start : start + size]) == best


def test_flover_figure_3():
    """Requests 2 and 5 of eight have finished: the last of the six live ones fill the holes."""
    live = [True, True, False, True, True, False, True, True]
    start = fewest_moves_window(live, sum(live))
    assert sum(not x for x in live[start : start + 6]) == 2


@seeds(300)
def test_random_use_keeps_live_slots_apart_and_inside_the_window(seeds):
    """Compaction moves live slots only onto free ones and does not widen the window."""
    for seed in seeds:
        rng = random.Random(seed)
        num = rng.randint(1, 40)
        buckets = tuple(sorted({*rng.sample(range(1, num + 1), min(3, num)), num}))
        table, live = SlotTable(num, buckets), set()
        for _ in range(60):
            if live and rng.random() < 0.5:
                slot = rng.choice(sorted(live))
                live.remove(slot)
                table.release(slot)
            elif len(live) < num:
                slot = table.take()
                assert slot not in live, seed
                live.add(slot)
            if live and rng.random() < 0.3:
                before = table.window()[1]
                for source, target in table.compact():
                    assert source in live and target not in live, seed
                    live.remove(source)
                    live.add(target)
                start, size = table.window()
                assert size <= before and size in buckets, seed
                assert all(start <= slot < start + size for slot in live), seed
                assert size == min(b for b in buckets if b >= len(live)) or size == before, seed
            assert table.num_live == len(live)


@pytest.mark.parametrize("ended", [(0,), (1, 3), (0, 1), (2, 3)])
def test_a_batch_keeps_its_window_when_some_of_it_have_ended(ended):
    """It has as many slots as the batch had at its start, with all live ones."""
    table = SlotTable(9, (1, 4, 9))
    for _ in range(4):
        table.take()
    for slot in ended:
        table.release(slot)
    assert table.window(min_size=4) == (0, 4)


def test_releasing_a_free_slot_is_refused():
    table = SlotTable(2, (2,))
    with pytest.raises(ValueError, match="not live"):
        table.release(0)
