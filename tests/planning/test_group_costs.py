"""Costs of two groups and their link, and what has no cost on one group."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.execution.step_cost import FlatCost, StepWork
from jaxserve.planning import DeviceRoofs, GroupCosts, ModelShape, RooflineCost
from jaxserve.scheduling.plan import LINK, Handover, Row, StepPlan
from tests.planning.step_times import made_up

pytestmark = pytest.mark.fast

ENCODE, DECODE = FlatCost(per_iteration_s=3.0), FlatCost(per_iteration_s=1.0)
COPY = StepPlan(
    index=0,
    num_iterations=0,
    handovers=(Handover(1, 0, 1, (4, 5)), Handover(2, 0, 1, (6,))),
    group=LINK,
)


def test_each_group_has_its_cost_and_the_link_its_bandwidth():
    """Three pages of ten bytes over five bytes a second, and half a second besides."""
    costs = GroupCosts((ENCODE, DECODE), page_bytes=10.0, link_bytes_per_s=5.0, handover_s=0.5)
    for group, cost in enumerate((ENCODE, DECODE)):
        plan = StepPlan(index=0, rows=(Row(0, 0, 0, 7, 1),), group=group)
        work = StepWork(plan, 28, (0,))
        assert costs.device_s(work) == cost.device_s(work)
        assert costs.host_s(plan) == cost.host_s(plan)
        slower = replace(costs, beside=(1.5, 2.0))
        assert slower.device_s(work) == cost.device_s(work)
        beside = replace(work, is_beside=True)
        assert slower.device_s(beside) == slower.beside[group] * cost.device_s(work)
    assert COPY.num_pages_handed_over == 3
    assert costs.device_s(StepWork(COPY, 0, ())) == 6.5
    behind = StepWork(COPY, 0, (), source_s=2.0)
    assert costs.device_s(behind) == 6.5
    assert replace(costs, copies_follow_steps=True).device_s(behind) == 8.5
    assert costs.host_s(COPY) == 0.0


def test_the_costs_of_one_group_have_no_link():
    """The message says what has."""
    roofs = DeviceRoofs(flops=1.0, memory_bytes_per_s=1.0, link_bytes_per_s=1.0, memory_bytes=1.0)
    model = ModelShape(num_params=1.0, num_layers=1, hidden_size=2)
    for cost in (made_up(), RooflineCost(model=model, roofs=roofs, page_tokens=4)):
        with pytest.raises(InvalidConfigError, match="3 pages.*GroupCosts"):
            cost.device_s(StepWork(COPY, 0, ()))
