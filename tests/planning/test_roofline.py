"""Rooflines by hand."""

from __future__ import annotations

import pytest

from jaxserve.engine.step_cost import StepWork
from jaxserve.planning import DeviceRoofs, ModelShape, RooflineCost
from jaxserve.scheduling.plan import Row
from tests.planning.step_times import plan

ROOFS = DeviceRoofs(
    flops=1000.0, memory_bytes_per_s=100.0, link_bytes_per_s=10.0, memory_bytes=1000.0
)
# Weights of 200 bytes; 8 bytes of KV a token.
MODEL = ModelShape(num_params=100.0, num_layers=1, hidden_size=2)


def _rows(*num_tokens: int) -> tuple[Row, ...]:
    return tuple(Row(i, i, 0, count, True) for i, count in enumerate(num_tokens))


def test_a_small_batch_takes_as_long_as_its_weights_and_kv_are_read():
    """Two seconds for the weights, and 0.08 a position."""
    cost = RooflineCost(model=MODEL, roofs=ROOFS, page_tokens=4)
    assert cost.kv_tokens == 100
    assert cost.device_s(StepWork(plan(_rows(1)), 0, (10,))) == pytest.approx(2.0 + 0.8)
    assert cost.device_s(StepWork(plan(_rows(1), num_iterations=2), 0, (10, 11))) == pytest.approx(
        4.0 + 0.8 + 0.88
    )


def test_a_prompt_takes_its_arithmetic():
    """200 operations a token, and 8 a position attended to."""
    cost = RooflineCost(model=MODEL, roofs=ROOFS, page_tokens=4)
    assert cost.device_s(StepWork(plan(_rows(50)), 1275, (0,))) == pytest.approx(10.0 + 10.2)


def test_a_pipeline_has_more_memory_and_arithmetic_and_reads_weights_once_a_part():
    """Two stages: attention and arithmetic in half the time, the weights in as long."""
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
