"""Plans become arrays: windows of compiled sizes, and the slots that take part."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.core.config import EngineConfig, fine_slot_buckets
from jaxserve.scheduling.plan import Row
from jaxserve.steps.packing import (
    body_size,
    decode_window,
    head_sizes,
    loop_sizes,
    pack_rows,
    pack_window,
    sampling_slots,
)
from jaxserve.steps.sampling.sampler import Variant
from tests.planning.step_times import plan


def _config(max_slots: int) -> EngineConfig:
    buckets = fine_slot_buckets(max_slots)
    return EngineConfig(num_pages=9, max_slots=max_slots, slot_buckets=buckets)


@pytest.mark.parametrize("variant", Variant)
@pytest.mark.parametrize("max_slots", [1, 4, 32, 48])
def test_a_window_of_a_compiled_size_holds_the_plans(variant, max_slots):
    """It is inside the slots and as small as possible, and only the rows take part."""
    config, rng = _config(max_slots), random.Random(max_slots)
    sizes = variant.sizes(config.slot_buckets)
    for _ in range(50):
        size = rng.choice(config.slot_buckets)
        start = rng.randint(0, max_slots - size)
        slots = rng.sample(range(start, start + size), rng.randint(0, size))
        rows = tuple(Row(slot, slot, 0, 1, max_new_tokens=1) for slot in slots)
        planned = plan(rows, window_start=start, window_size=size)
        window, num_proposed = decode_window(config, planned, variant)
        assert num_proposed == 0
        assert set(range(start, start + size)) <= set(window) <= set(range(max_slots))
        assert len(window) == min(each for each in sizes if each >= size)
        taking_part = np.array(window)[pack_window(window, rows).most > 0]
        assert sorted(taking_part) == sorted(slots)


def test_loops_that_speculate_have_few_slots():
    """Rows and proposals fill whole tiles of eight tokens where they can."""
    config = replace(_config(32), num_proposed=8)
    assert loop_sizes(config, Variant.GREEDY) == (1, 4, 8, 12, 16, 24, 32)
    assert loop_sizes(config, Variant.GREEDY, speculates=True) == (1, 4, 8, 12, 16)
    for variant in Variant:  # whatever is asked of the sampler, one request has its proposals
        assert loop_sizes(config, variant, speculates=True)[:2] == (1, 4)
        planned = replace(plan((), window_start=0, window_size=1), num_proposed=8)
        assert decode_window(config, planned, variant) == (range(1), 7)
    drafts = replace(config, num_proposed=4, drafts=True)
    assert loop_sizes(drafts, Variant.FULL, speculates=True) == (1, 4)
    assert [drafts.num_proposed_beside(size) for size in (1, 4, 8)] == [4, 4, 0]
    assert [config.num_proposed_beside(size) for size in (1, 4, 8, 12, 16, 24)] == [
        *(7, 4, 8, 4, 8, 0)
    ]
    assert [replace(config, num_proposed=3).num_proposed_beside(n) for n in (1, 4, 6, 7)] == [
        *(3, 3, 2, 0)
    ]
    rows = (Row(5, 0, 0, 1, max_new_tokens=7),)
    planned = replace(plan(rows, window_start=5, window_size=1), num_proposed=8)
    assert decode_window(config, planned, Variant.GREEDY) == (range(5, 6), 7)
    larger = replace(planned, window_start=0, window_size=17)
    assert decode_window(config, larger, Variant.GREEDY) == (range(24), 0)
    assert decode_window(config, larger, Variant.FULL) == (range(32), 0)
    assert pack_window(range(4, 8), rows).most.tolist() == [0, 7, 0, 0]


@pytest.mark.parametrize("variant", Variant)
def test_rows_that_sample_come_in_a_compiled_size(variant):
    """The slots of the rows are in order, followed by padding."""
    config = _config(32)
    sizes = variant.sizes(config.head_buckets)
    for count in (1, 3, 5, 32):
        rows = [Row(31 - i, i, 0, 1, max_new_tokens=int(i < count)) for i in range(32)]
        index = sampling_slots(config, rows, variant)
        assert len(index) == min(each for each in sizes if each >= count)
        assert index[:count].tolist() == [31 - i for i in range(count)]
        assert (index[count:] == config.max_slots).all()


def test_heads_with_masks_have_more_sizes():
    """Only those that return no log-probabilities."""
    config = replace(_config(32), masked_head_buckets=(8, 16, 64))
    rows = [Row(i, i, 0, 1, max_new_tokens=1) for i in range(7)]
    assert head_sizes(config, Variant.RANDOM) == (4, 32)
    for variant in (Variant.GREEDY, Variant.RANDOM):
        assert head_sizes(config, variant, has_masks=True) == (4, 8, 16, 32)
    assert head_sizes(config, Variant.FULL, has_masks=True) == (4, 32)
    assert len(sampling_slots(config, rows, Variant.RANDOM)) == 32
    index = sampling_slots(config, rows, Variant.RANDOM, has_masks=True)
    assert index.tolist() == [*range(7), config.max_slots]


def test_small_steps_have_small_sizes_unless_they_score_prompts():
    """The smallest size that holds the rows; for scored prompts, of those compiled first."""
    config = replace(_config(32), token_buckets=(8, 24, 64, 96, 128, 256, 512))
    rows = [Row(i, i, 0, 1, max_new_tokens=1) for i in range(20)]
    forced = replace(rows[0], num_tokens=60)
    scored = replace(rows[0], wants_prompt_logprobs=True)

    def size(rows: list[Row]) -> int:
        batch, starts = pack_rows(config, rows)
        ends = np.cumsum([row.num_tokens for row in rows])
        assert starts == [0, *ends[:-1]] and (batch.token_row < config.max_slots).sum() == ends[-1]
        return len(batch.token_row)

    assert config.coarse_token_buckets == (64, 128, 256, 512)
    assert size(rows) == 24
    assert size(rows[:3]) == 8
    assert size([forced, *rows]) == 96
    assert size([scored, *rows]) == 64
    assert body_size(config, rows, is_coarse=True) == 64


def test_no_step_waits_for_a_size_that_it_can_do_without():
    """While sizes are being made a step takes a larger one that exists, and else its own."""
    config = replace(_config(32), token_buckets=(8, 24, 64, 96, 128, 256, 512))
    rows = [Row(i, i, 0, 1, max_new_tokens=1) for i in range(20)]
    made = {64, 8, 128}
    assert body_size(config, rows, is_made=made.__contains__) == 64
    assert body_size(config, rows[:5], is_made=made.__contains__) == 8
    made.add(24)
    assert body_size(config, rows, is_made=made.__contains__) == 24
    assert body_size(config, rows, is_made=lambda _: False) == 24
    assert body_size(config, rows, is_coarse=True, is_made={256}.__contains__) == 256
