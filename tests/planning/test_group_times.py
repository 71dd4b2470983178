"""Step times of two device groups, measured on a simulated executor whose costs are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError, InvalidProfileError
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.execution.step_cost import FlatCost, StepWork
from jaxserve.planning import GroupCosts, GroupTimes
from jaxserve.planning.profiler import measure_beside, measure_groups
from jaxserve.planning.schedules import DeviceRoofs
from jaxserve.planning.step_roofline import ModelShape, RooflineCost
from jaxserve.planning.step_times import Origin, differences
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


CONFIG = EngineConfig(page_size=4, num_pages=80, max_slots=4, max_context=64, max_step_tokens=32)
ORIGIN = Origin(model={}, device={}, config=CONFIG, versions={})


@pytest.mark.parametrize("num_pages", [80, 9, 3])
def test_groups_and_handovers_have_their_own_times(num_pages):
    """A step takes 3 s on the encode group and 2 s on the other; a page 0.5 s after 0.25 s.

    Beside the other group's steps they take 1.5 times and 1.25 times as long.
    """
    config = EngineConfig(**{**vars(CONFIG), "num_pages": num_pages})
    costs = GroupCosts(
        (FlatCost(3.0, 0.0), FlatCost(2.0, 0.0)),
        page_bytes=2.0,
        link_bytes_per_s=4.0,
        handover_s=0.25,
        beside=(1.5, 1.25),
    )
    clock = VirtualClock()
    executor = SimulatedExecutor(config, clock, cost=costs)
    times = measure_groups(executor, [ORIGIN, ORIGIN], clock, rounds=1, progress=False)
    encode, decode = times.groups
    assert all(curve(0) == 3.0 for curve in encode.prefill_s.values())
    assert all(curve(0) == 2.0 for curve in decode.prefill_s.values())
    assert times.beside == pytest.approx((1.5, 1.25)) and times.costs().beside == times.beside
    for count in (8, 32):
        handover = Handover(0, 0, 1, tuple(range(count)))
        plan = StepPlan(index=0, num_iterations=0, handovers=(handover,), group=LINK)
        found = times.costs().device_s(StepWork(plan, 0, ()))
        # A pool of few pages has one point only, whose time is that of its pages.
        assert found == pytest.approx(0.25 + 0.5 * count, rel=1e-6 if num_pages == 80 else 0.3)


@pytest.mark.parametrize("has_encoder", [False, True])
@pytest.mark.parametrize("beside", [(1.0, 1.0), (1.75, 2.5)])
def test_steps_are_slowed_only_by_what_groups_share(has_encoder, beside):
    """Groups that share nothing are not slowed; loops end and begin again in short contexts."""
    config = replace(CONFIG, has_encoder=has_encoder, max_context=24)
    costs = GroupCosts(
        (FlatCost(7.0, 0.0), FlatCost(1.0, 0.0)),
        page_bytes=1.0,
        link_bytes_per_s=1.0,
        beside=beside,
    )
    clock = VirtualClock()
    executor = SimulatedExecutor(config, clock, cost=costs)
    assert measure_beside(executor, clock) == pytest.approx(beside, rel=0.02)


def _made_up(num_encode: int = 1, num_decode: int = 2) -> GroupTimes:
    times = made_up()
    groups = tuple(replace(times, origin=times.origin.on(num)) for num in (num_encode, num_decode))
    return GroupTimes(groups=groups, handover_s=0.25, page_s=0.5, beside=(1.25, 2.0))


def test_saved_times_of_two_groups_are_loaded_for_the_same_two_groups(tmp_path: Path):
    """Another size of one of the groups, or a file of one group's times, is refused."""
    times, path = _made_up(), tmp_path / "new" / "groups.json"
    times.save(path)
    origins = [each.origin for each in times.groups]
    found = GroupTimes.load(path, expected=origins)
    assert (found.handover_s, found.page_s, found.beside) == (0.25, 0.5, (1.25, 2.0))
    for own, loaded in zip(times.groups, found.groups, strict=True):
        assert replace(loaded, origin=own.origin) == own
        assert not differences(loaded.origin, own.origin)
    with pytest.raises(InvalidProfileError, match=r"the decode group of .*device.count is 2"):
        GroupTimes.load(path, expected=[origins[0], origins[0]])
    for wrong in ({"page_s": float("nan")}, {"handover_s": -1.0}, {"beside": (0.0, 1.0)}):
        replace(times, **wrong).save(path)
        with pytest.raises(InvalidProfileError, match="does not hold times of two groups"):
            GroupTimes.load(path)
    times.groups[0].save(path)
    with pytest.raises(InvalidProfileError, match="does not hold times of two groups"):
        GroupTimes.load(path)
