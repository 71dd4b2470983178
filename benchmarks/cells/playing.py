"""One run of a policy: simulated, or on the device in real time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.cells.applications import CellRequest, Simulated, decoder_steps
from benchmarks.cells.figures_of import WARM_SHARE, Served, figures_of
from jaxserve.cells.simulated import TaskCost

if TYPE_CHECKING:
    from jaxserve.cells import CellRuntime

_SPIN_S = 0.002


def simulate(
    model: Simulated,
    policy: Any,
    cost: TaskCost,
    requests: Sequence[CellRequest],
    arrivals: Sequence[float],
    *,
    num_workers: int = 1,
    max_in_flight: int = 2,
    warm_share: float = WARM_SHARE,
) -> dict[str, Any]:
    """Return the figures of a simulated run; the policy does not know the answers' lengths."""
    from jaxserve.cells.layout import Layout
    from jaxserve.cells.simulation import simulate_cells

    has_loop = any(cell.is_loop for cell in model.cells)
    done = simulate_cells(
        Layout(model.cells),
        [(at, model.unfold(one)) for at, one in zip(arrivals, requests, strict=True)],
        policy,
        cost,
        num_workers=num_workers,
        max_in_flight=max_in_flight,
        loop_length=decoder_length if has_loop else None,
    )
    served = _served(done.completions)
    return {**figures_of(served, warm_share=warm_share), **_counts(done.stats, {})}


def decoder_length(graph: Any, node: int) -> int:
    """Return the steps of a node; 1 for those that are no decoders."""
    return decoder_steps(graph, node) if graph.graph.max_steps[node] > 1 else 1


def serve(
    rt: CellRuntime, requests: Sequence[CellRequest], arrivals: Sequence[float]
) -> dict[str, Any]:
    """Return the figures of a run on the device, in real time; see `serve_all`."""
    before = _numbers(rt.stats())
    served, _ = serve_all(rt, requests, arrivals)
    return {**figures_of(served), **_counts(rt.stats(), before)}


def serve_all(
    rt: CellRuntime, requests: Sequence[CellRequest], arrivals: Sequence[float]
) -> tuple[list[Served], list[Any]]:
    """Submit requests at their times, and return when each was served, and the completions.

    Times are seconds after the start. Latency counts from the planned arrival, so a submission that
    is late counts as queueing.

    Raises:
      JaxserveError: the error of the first request that failed.
    """
    pending = []
    begin_s = time.perf_counter()
    for at_s, request in zip(arrivals, requests, strict=True):
        _wait_until(begin_s + at_s)
        pending.append(rt.submit(request))
    done = [one.result() for one in pending]
    for completion in done:
        if completion.error is not None:
            raise completion.error
    served = [
        Served(at_s, one.begin_s - begin_s, one.end_s - begin_s)
        for at_s, one in zip(arrivals, _served(done), strict=True)
    ]
    return served, done


def warm(rt: CellRuntime, requests: Sequence[CellRequest]) -> None:
    """Run some requests, so that the first measured one meets a warm runtime."""
    rt.generate(requests, progress=False)


def _wait_until(time_s: float, now: Callable[[], float] = time.perf_counter) -> None:
    while (left_s := time_s - now()) > 0:
        time.sleep(left_s if left_s < _SPIN_S else left_s - _SPIN_S)


def _served(completions: Sequence[Any]) -> list[Served]:
    found = []
    for completion in completions:
        timing = completion.timing
        assert timing.admitted_s is not None and timing.finished_s is not None
        found.append(Served(timing.arrival_s, timing.admitted_s, timing.finished_s))
    return found


def _numbers(stats: Any) -> dict[str, float]:
    names = ("num_tasks", "num_nodes", "num_padding", "scheduling_s", "submitting_s")
    return {name: getattr(stats, name) for name in names}


def _counts(stats: Any, before: dict[str, float]) -> dict[str, Any]:
    """Return the run's own counters, and the mean rows of a task that have a node."""
    own = {name: value - before.get(name, 0) for name, value in _numbers(stats).items()}
    return {**own, "average_batch": own["num_nodes"] / own["num_tasks"]}
