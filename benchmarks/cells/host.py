"""The host's work on cells, in nodes a second, without a device: `python -m benchmarks.cells.host`.

No device computes anything, and JAX is not loaded. Prints one JSON object;
docs/benchmarks/cells.md says what each figure means.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from benchmarks.cells.applications import (
    APPLICATIONS,
    SIZES,
    CellRequest,
    Simulated,
    requests_of,
    simulated,
)
from benchmarks.cells.contenders import OURS, batch_sizes_of
from benchmarks.common.harness import Benchmark, option
from benchmarks.common.repeats import Figures, repeats, summary, take_turns
from jaxserve.cells import BatchMaker
from jaxserve.cells.answers import CellAnswer
from jaxserve.cells.engine import CellEngine
from jaxserve.cells.executor import CellHandle, TaskResults, calls_of
from jaxserve.cells.flat_graph import FlatGraph, flatten
from jaxserve.cells.graph import MAX_NODES
from jaxserve.cells.layout import NUM_RESERVED_SLOTS, CellLayout
from jaxserve.cells.policy import Task, TaskGroup
from jaxserve.cells.value_table import ValueTable
from jaxserve.core.clock import WallClock
from jaxserve.workload.sentences import SentenceLengths

_NUM_SLOTS = 1 << 16
_MAX_FUSED = 5
# The seconds of each part of a run.
_PARTS = ("unfolding_s", "serving_s", "scheduling_s")


def run(options: argparse.Namespace) -> dict[str, Any]:
    sizes = SIZES[options.size]
    requests: dict[str, list[CellRequest]] = {}
    for application in APPLICATIONS:
        lengths = SentenceLengths().draw(options.num_requests, options.seed)
        requests[application] = requests_of(
            application, lengths, vocab_size=sizes.vocab_size, seed=options.seed
        )

    def play(application: str) -> Figures:
        model = simulated(application, batch_sizes_of(OURS, sizes))
        return measure(model, requests[application])

    runs = take_turns(APPLICATIONS, options.repeats, play)
    return {"points": [{"application": name, **summary(own)} for name, own in runs.items()]}


def measure(model: Simulated, requests: Sequence[CellRequest]) -> dict[str, float]:
    """Return the figures of requests that all wait at the start, on one thread.

    `nodes_per_s` counts all of the host's work, and `scheduled_per_s` the policy's alone; steps of
    loops count as nodes.
    """
    layout = CellLayout(model.cells)
    clock = WallClock()
    engine = CellEngine(
        HostCells(layout), BatchMaker(max_tasks_to_submit=_MAX_FUSED), clock, max_nodes=MAX_NODES
    )
    gc.collect()
    gc.freeze()
    begin_s = time.perf_counter()
    answers = []
    for number, one in enumerate(requests):
        graph = flatten(model.unfold(one), layout, max_nodes=MAX_NODES)
        _ = graph.graph.links  # computed by the thread that submits
        answers.append(CellAnswer(f"{number}", graph, 0.0))
    unfolded_s = time.perf_counter()
    for answer in answers:
        engine.begin(answer)
    while engine.has_work:
        engine.step()
    end_s = time.perf_counter()
    gc.unfreeze()
    for answer in answers:
        error = answer.future.result().error
        if error is not None:
            raise error
    num_nodes = engine.stats.num_nodes
    seconds = unfolded_s - begin_s, end_s - unfolded_s, engine.stats.scheduling_s
    return {
        "nodes_per_s": num_nodes / (end_s - begin_s),
        "scheduled_per_s": num_nodes / engine.stats.scheduling_s,
        "requests_per_s": len(requests) / (end_s - begin_s),
        **dict(zip(_PARTS, seconds, strict=True)),
    }


@final
class HostCells:
    """A `CellExecutor` of one worker that describes tasks as one of devices does, and runs none.

    A loop's first word gives its last step.
    """

    num_workers = 1

    def __init__(self, layout: CellLayout):
        self.layout = layout
        self.num_slots = (_NUM_SLOTS - NUM_RESERVED_SLOTS,) * len(layout.pools)
        self._table = ValueTable(layout, 1, (_NUM_SLOTS,) * len(layout.pools))
        self._values: dict[int, list[int]] = {}  # node -> values that are read when it has run
        self._steps_left: dict[int, int] = {}  # of loops

    def add(self, graph: FlatGraph, first_row: int, kept_row: int = 0) -> None:
        self._table.add(graph, first_row, kept_row)
        for node in graph.plan.loops:
            self._steps_left[first_row + node] = int(graph.words[node, 0])
        for value, _ in graph.wanted:
            node = value // self.layout.stride
            if node not in graph.plan.loops:
                own = self._values.setdefault(first_row + node, [])
                own.append(first_row * self.layout.stride + value)

    def shrink(self, graph: FlatGraph, first_row: int, kept: Sequence[int]) -> None:
        self._table.shrink(graph, first_row, kept)

    def remove(self, graph: FlatGraph, first_row: int) -> None:
        self._table.remove(first_row)
        for value, _ in graph.wanted:
            self._values.pop(first_row + value // self.layout.stride, None)

    def submit(self, worker: int, tasks: Sequence[Task]) -> list[CellHandle]:
        found: list[CellHandle] = []
        for size, some in calls_of(tasks, self.layout, _MAX_FUSED):
            rows = np.zeros((len(some), size, self.layout.width), np.int32)
            for number, nodes in enumerate(some.arrays()):
                rows[number, : len(nodes)] = self._table.rows_of(some.type, nodes)
            own = some.array.tolist()
            values = [value for node in own for value in self._values.get(node, ())]
            ended = self._ended(some)
            found.append(_Handle(some, TaskResults(ended, values=self._read(values))))
        return found

    def read(self, worker: int, values: Sequence[int]) -> CellHandle:
        return _Handle(None, TaskResults(values=self._read(values)))

    def check_integrity(self) -> None:
        self._table.check_integrity()

    def close(self) -> None:
        """Do nothing: there is no device memory."""

    def _ended(self, tasks: TaskGroup) -> list[frozenset[int]]:
        found: list[frozenset[int]] = []
        for task in tasks if self.layout.types[tasks.type].is_loop else ():
            for node in task.nodes:
                self._steps_left[node] -= 1
            found.append(frozenset(node for node in task.nodes if self._steps_left[node] <= 0))
        return found

    def _read(self, values: Sequence[int]) -> list[tuple[int, np.ndarray]]:
        return [(value, _VALUE) for value in values]


_VALUE = np.zeros(1, np.float32)


@final
class _Handle:
    def __init__(self, tasks: TaskGroup | None, results: TaskResults):
        self.tasks = tasks
        self._results = results

    @property
    def has_news(self) -> bool:
        return bool(self._results.values) or any(self._results.ended)

    def is_ready(self) -> bool:
        return True

    def collect(self) -> TaskResults:
        return self._results


OPTIONS = (
    option("--size", "small", "the largest batches", choices=tuple(SIZES)),
    option("--num-requests", 500, "of each application"),
    option("--seed", 0, "of lengths, trees and tokens"),
    repeats("application"),
)
main = Benchmark(__doc__, run, OPTIONS, "cells_host")


if __name__ == "__main__":
    sys.exit(main())
