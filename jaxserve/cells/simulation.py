"""Simulation of cells: the real policy and engine, simulated workers and clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.cells.answers import CellAnswer
from jaxserve.cells.engine import CellEngine
from jaxserve.cells.flat_graph import flatten
from jaxserve.cells.graph import MAX_NODES, Graph
from jaxserve.cells.layout import Layout
from jaxserve.cells.policy import CellPolicy
from jaxserve.cells.results import CellCompletion
from jaxserve.cells.simulated import LoopLength, SimulatedCells, TaskCost
from jaxserve.cells.stats import CellStats
from jaxserve.core.clock import VirtualClock
from jaxserve.core.errors import InvalidConfigError
from jaxserve.engine.recorder import Records


@final
@dataclass(frozen=True)
class MeasuredCost:
    """A cost from the seconds of each cell's compiled sizes.

    Attributes:
      seconds: name of the cell -> batch size -> seconds of a task. Other sizes are interpolated.
      host_per_call_s, host_per_task_s: seconds of the host for tasks that are submitted together.
    """

    seconds: Mapping[str, Mapping[int, float]]
    host_per_call_s: float = 0.0
    host_per_task_s: float = 0.0

    def task_s(self, cell: str, batch: int) -> float:
        sizes = self.seconds[cell]
        if batch in sizes:
            return sizes[batch]
        known = sorted(sizes)
        return float(np.interp(batch, known, [sizes[size] for size in known]))

    def host_s(self, num_tasks: int) -> float:
        return self.host_per_call_s + num_tasks * self.host_per_task_s


@final
@dataclass(frozen=True, kw_only=True)
class CellSimulation:
    """The result of a simulation. Times are virtual seconds from the start of the run.

    Attributes:
      completions: in the order of the requests; the values have no meaning.
      wall_s: end of the last request.
    """

    completions: tuple[CellCompletion, ...]
    wall_s: float
    records: Records
    stats: CellStats


def simulate_cells(
    layout: Layout,
    requests: Sequence[tuple[float, Graph]],
    policy: CellPolicy,
    cost: TaskCost,
    *,
    num_workers: int = 1,
    max_in_flight: int = 2,
    max_tasks_to_submit: int = 5,
    loop_length: LoopLength | None = None,
) -> CellSimulation:
    """Simulate requests under a policy, without a device.

    The code that serves on devices makes every decision.

    Args:
      requests: (arrival in seconds, graph), in the order of their arrivals. A graph is used once.
      num_workers, max_in_flight: as of a `CellRuntime`.
      max_tasks_to_submit: most tasks of one type and size that one call runs, as of a
        `CellRuntime`; pass the policy's own.
      loop_length: when loops end; by default at their `max_steps`.

    Raises:
      InvalidCellError: two cells have one name.
      InvalidConfigError: an option is not allowed.
    """
    layout.require_names()
    for name, value in (
        ("num_workers", num_workers),
        ("max_in_flight", max_in_flight),
        ("max_tasks_to_submit", max_tasks_to_submit),
    ):
        if value < 1:
            raise InvalidConfigError(f"{name}={value} is not allowed; pass at least 1")
    clock = VirtualClock()
    executor = SimulatedCells(
        layout,
        clock,
        cost,
        num_workers=num_workers,
        max_fused=max_tasks_to_submit,
        loop_length=loop_length,
    )
    engine = CellEngine(executor, policy, clock, max_in_flight=max_in_flight, max_nodes=MAX_NODES)
    answers = [
        CellAnswer(f"{number}", flatten(graph, layout, max_nodes=MAX_NODES), arrival_s)
        for number, (arrival_s, graph) in enumerate(requests)
    ]
    arrivals = [arrival_s for arrival_s, _ in requests]
    for arrival_s in arrivals:
        clock.expect(arrival_s)
    num_arrived = 0
    while num_arrived < len(answers) or engine.has_work:
        while num_arrived < len(answers) and arrivals[num_arrived] <= clock.now():
            engine.add(answers[num_arrived])
            num_arrived += 1
        next_s = arrivals[num_arrived] if num_arrived < len(answers) else None
        wake_s = engine.idle_until_s if engine.has_work else next_s
        if wake_s is not None and wake_s > clock.now():
            clock.advance_to(wake_s if next_s is None else min(wake_s, next_s))
            continue
        engine.step()
    completions = tuple(answer.future.result() for answer in answers)
    return CellSimulation(
        completions=completions,
        wall_s=max((c.timing.finished_s or 0.0 for c in completions), default=0.0),
        records=engine.recorder.records,
        stats=engine.stats,
    )
