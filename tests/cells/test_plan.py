"""Settings of cells are chosen by simulation under a latency bound."""

from __future__ import annotations

import time

import numpy as np
import pytest
from flax import nnx

from jaxserve.cells import CellRuntime
from jaxserve.cells.measure import measure_cells
from jaxserve.cells.models import LSTM, Embedded, sequence_model
from jaxserve.cells.plan import plan_cells
from jaxserve.cells.simulation import MeasuredTaskCost
from jaxserve.core.errors import InfeasibleBoundError, InvalidConfigError
from tests.cells.examples import chain, chain_cell

CELL = chain_cell(batch_sizes=(1, 4, 16))
GRAPHS = [chain(CELL, 2 + number % 5) for number in range(24)]
# Batches of 16 do most nodes a second, and take longest.
COST = MeasuredTaskCost({"chain": {1: 1.0, 4: 1.2, 16: 4.0}})


def plan(bound_s: float):
    """Return the plan for a bound of the median."""
    return plan_cells([CELL], GRAPHS, COST, latency_bound_s=bound_s, quantile=0.5, progress=False)


@pytest.mark.release
def test_a_looser_bound_allows_more_requests():
    """Both bounds are kept, and the sizes are those of the cell up to some largest one."""
    tight, loose = plan(8.0), plan(200.0)
    for sizes in (tight.batch_sizes["chain"], loose.batch_sizes["chain"]):
        assert sizes == CELL.batch_sizes[: len(sizes)]
    assert tight.latency_s <= 8.0 and loose.latency_s <= 200.0
    assert loose.rate > tight.rate


@pytest.mark.release
def test_a_plan_keeps_its_bound_on_the_device():
    """With measured costs, at half of its rate: the median of requests that arrive at random."""
    embedded = Embedded(LSTM(64, 384, rngs=nnx.Rngs(0)), 50, rngs=nnx.Rngs(1))
    model = sequence_model(embedded, batch_sizes=(1, 4, 16))
    sample = [[number % 50] * (4 + number % 9) for number in range(40)]
    cost = measure_cells(model.cells, host_per_call_s=1e-3)
    bound_s = 0.05 + 50 * cost.task_s("lstm", 1)  # about four times the longest request's alone
    found = plan_cells(
        model.cells,
        [model.unfold(tokens) for tokens in sample],
        cost,
        latency_bound_s=bound_s,
        quantile=0.5,
        progress=False,
    )
    cells = [cell.resized(found.batch_sizes[cell.name]) for cell in model.cells]
    options = {"max_tasks_to_submit": found.max_tasks_to_submit, "progress": False}
    gaps = np.random.default_rng(0).exponential(2 / found.rate, len(sample))
    with CellRuntime(cells, model.unfold, **options) as rt:
        rt.generate(sample)
        begin_s, pending = time.perf_counter(), []
        for at_s, tokens in zip(np.cumsum(gaps), sample, strict=True):
            time.sleep(max(0.0, begin_s + at_s - time.perf_counter()))
            pending.append(rt.submit(tokens))
        latencies = [one.result(60).timing.latency_s or np.inf for one in pending]
    assert np.median(latencies) <= bound_s


def test_a_bound_below_one_request_is_refused():
    """The error says how long a request takes alone."""
    with pytest.raises(InfeasibleBoundError) as caught:
        plan(2.0)
    assert 3.0 <= caught.value.lowest["latency_bound_s"] <= 6.0


def test_a_sample_is_needed():
    """There is nothing to simulate without graphs."""
    with pytest.raises(InvalidConfigError, match="graphs"):
        plan_cells([CELL], [], COST, latency_bound_s=1.0)
