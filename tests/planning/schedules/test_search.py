"""The search against exhaustive enumeration, and its errors."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from benchmarks.exegpt.algorithm_1 import misses_of, monotone_search
from benchmarks.exegpt.scenarios import DEPLOYMENTS
from jaxserve.core.errors import DeviceMemoryError, InfeasibleBoundError, InvalidConfigError
from jaxserve.planning.schedules import (
    CLUSTERS,
    MODELS,
    Deployment,
    LatencyBounds,
    Points,
    TaskLengths,
    Timeline,
    timelines_of,
)
from jaxserve.planning.schedules.layer_cost import Boxes, RooflineLayerCost
from jaxserve.planning.schedules.rra_planner import RememberedTimeline
from jaxserve.planning.schedules.search import maximise, search, shortest, throughput_under
from jaxserve.workload.tasks import TASKS
from tests.common.tiers import some
from tests.planning.schedules.made_up import (
    MadeUpCost,
    always,
    cluster_of,
    enumerate_all,
    model_of,
    random_case,
)


def _bounds(timelines: Sequence[Timeline], rng: np.random.Generator) -> LatencyBounds:
    """Bounds between the lowest latency and several times that, of one, two or three kinds."""
    bounds = {}
    for name in ("latency_s", "first_token_s", "token_s"):
        best = enumerate_all(timelines, shortest(name))
        if best.found and (name == "latency_s" or rng.random() < 0.2):
            bounds[name] = rng.choice([1.0, 1.1, 1.5, 3.0, math.inf]) / best.score
    return LatencyBounds(**bounds)


def _cases(num: int, seed: int) -> Iterator[tuple[Sequence[Timeline], LatencyBounds]]:
    rng = np.random.default_rng(seed)
    for _ in range(num):
        timelines = timelines_of(*random_case(rng))
        yield timelines, _bounds(timelines, rng)


@pytest.mark.release
@pytest.mark.parametrize("seed", some(range(8)))
def test_the_search_finds_the_best_of_all_configurations(seed: int):
    """400 random models, clusters, costs, tasks and bounds in all, monotone or not."""
    for number, (timelines, bounds) in enumerate(_cases(50, seed)):
        expected = enumerate_all(timelines, throughput_under(bounds))
        found = maximise(timelines, throughput_under(bounds))
        assert found.score == pytest.approx(expected.score, rel=1e-8), (seed, number)
        for name in bounds.finite():
            expected = enumerate_all(timelines, shortest(name))
            found = maximise(timelines, shortest(name))
            assert found.score == pytest.approx(expected.score, rel=1e-8), (seed, number, name)


@pytest.mark.release
@pytest.mark.parametrize("seed", some(range(4)))
def test_no_configuration_beats_the_limits_of_its_box(seed: int):
    """Random boxes of random cases: every point in them, for throughput, latencies and memory."""
    rng = np.random.default_rng(100 + seed)
    num_checked = 0
    for _ in range(60):
        for timeline in timelines_of(*random_case(rng)):
            whole = timeline.boxes()
            which = rng.integers(len(whole), size=1)
            box = _part(whole[which], rng)
            batch, control = np.meshgrid(
                np.arange(box.low.encode_batch[0], box.high.encode_batch[0] + 1),
                np.arange(box.low.control[0], box.high.control[0] + 1),
            )
            layout = np.full(batch.size, box.low.layout[0])
            figures = timeline.estimate(Points(layout, batch.ravel(), control.ravel()))
            best = timeline.bound(box)
            fits = figures.fits
            assert best.fits[0] or not fits.any(), seed
            for name in ("latency_s", "first_token_s", "token_s"):
                lowest = getattr(best, name)[0]
                assert (getattr(figures, name)[fits] >= lowest * (1 - 1e-9)).all(), (seed, name)
            assert (figures.throughput[fits] <= best.throughput[0] * (1 + 1e-9)).all(), seed
            num_checked += int(fits.sum())
    assert num_checked > 500


def _part(box: Boxes, rng: np.random.Generator) -> Boxes:
    """Return a random part of a box."""
    batch = np.sort(rng.integers(box.low.encode_batch[0], box.high.encode_batch[0] + 1, 2))
    control = np.sort(rng.integers(box.low.control[0], box.high.control[0] + 1, 2))
    return Boxes(
        Points(box.low.layout, batch[:1], control[:1]),
        Points(box.low.layout, batch[1:], control[1:]),
    )


def test_boxes_cover_every_configuration_once():
    """Their numbers of points add up to all layouts, batches and values of the control."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        for timeline in timelines_of(*random_case(rng)):
            boxes = timeline.boxes()
            num = len(timeline.layouts) * timeline.max_encode_batch * timeline.max_control
            assert boxes.num_points.sum() == num
            assert len({(int(p.layout[0]), int(p.encode_batch[0])) for p in _rows(boxes)}) == len(
                boxes
            )


def _rows(boxes: Boxes) -> list[Points]:
    return [boxes.low[i : i + 1] for i in range(len(boxes))]


@pytest.mark.release
def test_algorithm_1_alone_misses_schedules_and_the_report_counts_them():
    """On jagged random cases it misses some; where it finds one, it keeps the bounds."""
    cases = [
        ([RememberedTimeline(each) for each in timelines], bounds)
        for timelines, bounds in _cases(60, 11)
    ]
    report = misses_of(cases)
    assert 0.0 < report.missed_share < 1.0 and 1 < report.num_cases <= 60
    assert 0.0 <= report.worst_share < 1.0
    not_found_share = report.num_not_found / report.num_cases
    assert not_found_share <= report.beyond_tolerance_share <= report.missed_share
    assert misses_of(cases, tolerance=1.0).beyond_tolerance_share == 0
    wide = misses_of(cases, tolerance=0.5)
    assert wide.missed_share < report.missed_share and wide.num_evaluated > report.num_evaluated
    for timelines, bounds in cases[:20]:
        found = monotone_search(timelines, bounds).found
        assert found is None or bounds.met(found.estimates).all()


def test_algorithm_1_is_exact_where_everything_is_monotone():
    """One device and costs in proportion: no rounding of layers, batches or phases."""
    cost = MadeUpCost(token_s=0.1, row_s=0.1, read_s=1.0)
    deployment = Deployment(
        model=model_of(1), cluster=cluster_of(1), cost=cost, max_encode_batch=200
    )
    timelines = timelines_of(deployment, TaskLengths(always(3), always(2)), ("rra", "waa"))
    for latency_s in (1.6, 2.5, 7.7, 33.3, math.inf):
        bounds = LatencyBounds(latency_s=latency_s)
        expected = enumerate_all(timelines, throughput_under(bounds))
        for at_a_time in (1, 32):
            found = monotone_search(timelines, bounds, tolerance=0.0, at_a_time=at_a_time)
            assert found.score == pytest.approx(expected.score)
            assert found.num_evaluated < 0.5 * expected.num_evaluated


def test_of_equal_throughputs_the_lowest_latency_is_chosen():
    """Encoding limits WAA: the number of micro-batches then only changes the latency."""
    rng = np.random.default_rng(23)
    for _ in range(20):
        deployment, lengths = random_case(rng)
        timelines = timelines_of(deployment, lengths)
        try:
            choice = search(deployment, lengths, LatencyBounds())
        except DeviceMemoryError:
            continue
        best = enumerate_all(timelines, throughput_under(LatencyBounds()))
        assert choice.estimates.throughput == pytest.approx(best.score)
        assert best.found is not None
        assert choice.estimates.latency_s <= best.found.estimates.latency_s[0] * (1 + 1e-6)


def test_an_infeasible_bound_says_the_lowest_feasible_one():
    """One device: the prompt takes 0.5 s a token, and an answer of 5 four iterations of 1.25 s."""
    deployment = Deployment(model=model_of(1), cluster=cluster_of(1), cost=MadeUpCost())
    lengths = TaskLengths(always(4), always(5))
    with pytest.raises(InfeasibleBoundError, match="latency_s=6.*lowest.*latency_s=7") as raised:
        search(deployment, lengths, LatencyBounds(latency_s=6.0))
    assert raised.value.lowest["latency_s"] == pytest.approx(2.0 + 4 * 1.25)
    again = pickle.loads(pickle.dumps(raised.value))
    assert again.lowest == raised.value.lowest and str(again) == str(raised.value)
    choice = search(deployment, lengths, LatencyBounds(latency_s=7.0))
    assert (choice.schedule.encode_batch, choice.schedule.num_decodes) == (1, 4)
    assert choice.num_evaluated <= 2 * choice.num_points


def test_a_model_that_fits_nowhere_is_named():
    """28 bytes of weights and 48 of KV do not fit in 70."""
    deployment = Deployment(
        model=model_of(1), cluster=cluster_of(1, memory_bytes=70.0), cost=MadeUpCost()
    )
    with pytest.raises(DeviceMemoryError, match="no schedule fits"):
        search(deployment, TaskLengths(always(4), always(5)), LatencyBounds())


@pytest.mark.parametrize("bound", [{"latency_s": 0.0}, {"token_s": -1.0}, {"token_s": 10**400}])
def test_bounds_are_above_zero(bound: dict[str, float]):
    with pytest.raises(InvalidConfigError, match="not allowed"):
        LatencyBounds(**bound)


@pytest.mark.release
@pytest.mark.parametrize("task", some(["C2", "S"]))
def test_the_largest_model_is_planned_within_a_second(task: str):
    """GPT-3 341B on 48 A40, four bounds: under 1 % of the points, a second of CPU time each."""
    model, name, num_devices = DEPLOYMENTS[-1]
    cluster = CLUSTERS[name].of(num_devices)
    cost = RooflineLayerCost(MODELS[model], cluster)
    deployment = Deployment(model=MODELS[model], cluster=cluster, cost=cost)
    lengths = TaskLengths.of_task(TASKS[task])
    fastest_s = 1 / maximise(timelines_of(deployment, lengths), shortest("latency_s")).score
    for share in (1.05, 1.5, 4.0, math.inf):
        began_s = time.process_time()
        choice = search(deployment, lengths, LatencyBounds(latency_s=share * fastest_s))
        assert time.process_time() - began_s < 1.0
        assert choice.num_evaluated < 0.01 * choice.num_points
        assert choice.estimates.latency_s <= share * fastest_s
