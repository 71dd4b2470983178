"""Rooflines, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.execution.step_cost import StepWork
from jaxserve.memory.snapshots import HostStateCopy, StateCopy
from jaxserve.planning.schedules import DeviceRoofs
from jaxserve.planning.step_roofline import ModelShape, RooflineCost
from jaxserve.scheduling.plan import Row
from tests.planning.step_times import plan

pytestmark = pytest.mark.fast

ROOFS = DeviceRoofs(
    flops=1000.0, memory_bytes_per_s=100.0, link_bytes_per_s=10.0, memory_bytes=1000.0
)
# Weights of 200 bytes; 8 bytes of KV per token.
MODEL = ModelShape(num_params=100.0, num_layers=1, hidden_size=2)


def _rows(*num_tokens: int) -> tuple[Row, ...]:
    return tuple(Row(i, i, 0, count, True) for i, count in enumerate(num_tokens))


def test_a_small_batch_takes_as_long_as_its_weights_and_kv_are_read():
    """It takes two seconds for the weights, and 0.08 per position."""
    cost = RooflineCost(model=MODEL, roofs=ROOFS, page_tokens=4)
    assert cost.kv_tokens == 100
    assert cost.device_s(StepWork(plan(_rows(1)), 0, (10,))) == pytest.approx(2.0 + 0.8)
    assert cost.device_s(StepWork(plan(_rows(1), num_iterations=2), 0, (10, 11))) == pytest.approx(
        4.0 + 0.8 + 0.88
    )


def test_a_prompt_takes_its_arithmetic():
    """It takes 200 operations per token, and 8 per position attended to."""
    cost = RooflineCost(model=MODEL, roofs=ROOFS, page_tokens=4)
    assert cost.device_s(StepWork(plan(_rows(50)), 1275, (0,))) == pytest.approx(10.0 + 10.2)


def test_a_pipeline_has_more_memory_and_arithmetic_and_reads_weights_once_a_part():
    """With two stages attention and arithmetic take half the time, and the weights the same."""
    one = RooflineCost(model=MODEL, roofs=ROOFS, page_tokens=4)
    two = RooflineCost(model=MODEL, roofs=ROOFS, page_tokens=4, num_stages=2)
    assert two.kv_tokens == 225
    decoding = StepWork(plan(_rows(1)), 0, (10,))
    assert two.device_s(decoding) == pytest.approx(2.0 + 0.4)
    prompt = StepWork(plan(_rows(50)), 1275, (0,))
    assert two.device_s(prompt) == pytest.approx(one.device_s(prompt) / 2)


def test_swapped_pages_pass_the_link():
    """A page of four tokens is 32 bytes."""
    cost = RooflineCost(model=MODEL, roofs=ROOFS, page_tokens=4)
    step = plan(_rows(1), swaps_out=((1, 0), (2, 1)))
    assert cost.device_s(StepWork(step, 0, (0,))) == pytest.approx(2.0 + 6.4)


def test_states_pass_the_link_too():
    """Two of the three copies are to the host or from it, of 50 bytes each."""
    cost = RooflineCost(model=MODEL, roofs=ROOFS, page_tokens=4, state_bytes=50.0)
    saves = (StateCopy(0, 0, 0), HostStateCopy(0, 1, goes_out=True))
    step = plan(_rows(1), saves=saves, restores=(StateCopy(1, 0, 0), StateCopy(2, 0, 0, True)))
    assert cost.device_s(StepWork(step, 0, (0,))) == pytest.approx(2.0 + 10.0)


def test_query_heads_that_share_keys_halve_what_is_kept():
    """With two query heads per KV head: 4 bytes per token to read and swap; equal arithmetic."""
    cost = RooflineCost(model=replace(MODEL, group_size=2), roofs=ROOFS, page_tokens=4)
    assert cost.kv_tokens == 200 and cost.swap_s(1) == pytest.approx(1.6)
    assert cost.device_s(StepWork(plan(_rows(1)), 0, (10,))) == pytest.approx(2.0 + 0.4)
    assert cost.device_s(StepWork(plan(_rows(50)), 1275, (0,))) == pytest.approx(10.0 + 10.2)


def test_a_short_row_after_a_long_context_takes_as_long_as_its_keys_are_read():
    """Two tokens after 1,000 take 16 seconds of arithmetic, and 1,002 positions of 0.08."""
    cost = RooflineCost(model=MODEL, roofs=ROOFS, page_tokens=4)
    rows = (Row(0, 0, 1000, 2, True), Row(1, 1, 7, 1, True))
    step = StepWork(plan(rows), 2003, (8,))
    assert cost.device_s(step) == pytest.approx(2.0 + 80.16 + 0.64)


def test_shards_share_weights_and_heads_and_send_two_sums_a_layer():
    """Each of two shards has half of everything; a token's sums are 4 bytes, at 50 a second."""
    roofs = replace(ROOFS, peer_bytes_per_s=50.0)
    one = RooflineCost(model=MODEL, roofs=ROOFS, page_tokens=4)
    two = RooflineCost(model=MODEL, roofs=roofs, page_tokens=4, num_shards=2)
    assert two.kv_tokens == 225 and two.swap_s(1) == pytest.approx(1.6)
    decoding = StepWork(plan(_rows(1)), 0, (10,))
    assert two.device_s(decoding) == pytest.approx(1.0 + 0.4 + 0.16)
    prompt = StepWork(plan(_rows(50)), 1275, (0,))
    assert two.device_s(prompt) == pytest.approx(one.device_s(prompt) / 2 + 50 * 0.16)


def test_hidden_copies_take_time_only_where_the_link_is_the_slowest():
    """Two pages out take 6.4 seconds and one in 3.2, at the same time; the step alone takes 2."""
    cost = RooflineCost(model=MODEL, roofs=ROOFS, page_tokens=4, hides_copies=True)
    step = plan(_rows(1), swaps_out=((1, 0), (2, 1)), swaps_in=((3, 4),))
    assert cost.device_s(StepWork(step, 0, (0,))) == pytest.approx(6.4)
    faster = replace(cost, roofs=replace(ROOFS, link_bytes_per_s=1000.0))
    assert faster.device_s(StepWork(step, 0, (0,))) == pytest.approx(2.0)


def test_a_chunk_costs_what_its_row_adds_to_a_full_step():
    """Four tokens take 0.2 seconds each, plus one read of their context; the scheduler agrees."""
    cost = RooflineCost(model=MODEL, roofs=ROOFS, page_tokens=4)
    chunk_cost = cost.chunk_cost(1000)
    for context in (16, 100, 900):
        assert chunk_cost(context) == pytest.approx(0.8 + 0.08 * context)
    full = StepWork(plan(_rows(50)), 1275, (0,))
    rows = (*_rows(50), Row(50, 50, 96, 4, False))
    more = StepWork(plan(rows), 1275 + 4 * 100, (0,))
    added_s = cost.device_s(more) - cost.device_s(full)
    assert 0.8 < added_s <= chunk_cost(100)
    swap = cost.swap_costs()
    assert swap.page_s == pytest.approx(3.2)
    assert 4 * (swap.token_s + 100 * swap.position_s) == pytest.approx(chunk_cost(100))
