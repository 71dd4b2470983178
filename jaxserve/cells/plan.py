"""The batch sizes of cells that serve the most requests under a latency bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from tqdm import tqdm

from jaxserve.cells.base import BaseCell
from jaxserve.cells.batchmaker import BatchMaker
from jaxserve.cells.graph import Graph
from jaxserve.cells.layout import CellLayout
from jaxserve.cells.simulation import LoopLength, TaskCost, simulate_cells
from jaxserve.core.errors import InfeasibleBoundError, InvalidConfigError

# Relative tolerance of a plan's rate.
_TOLERANCE = 0.05
# Numbers of tasks submitted together from which the search chooses.
_TASKS = (1, 2, 5, 10)


@final
@dataclass(frozen=True, kw_only=True)
class CellPlan:
    """Settings of a `CellRuntime`, with their simulated rate and latency.

    Attributes:
      batch_sizes: of each cell, by its name.
      rate: highest rate, in requests a second with random arrivals, that keeps the bound.
      latency_s: the latency at that rate, of the quantile that the bound is for.
    """

    batch_sizes: Mapping[str, tuple[int, ...]]
    max_tasks_to_submit: int
    rate: float
    latency_s: float


def plan_cells(
    cells: Sequence[BaseCell],
    graphs: Sequence[Graph],
    cost: TaskCost,
    *,
    latency_bound_s: float,
    quantile: float = 0.99,
    num_workers: int = 1,
    max_in_flight: int = 2,
    loop_length: LoopLength | None = None,
    seed: int = 0,
    progress: bool = True,
) -> CellPlan:
    """Find the settings with the highest rate at which a quantile of latencies keeps a bound.

    Every candidate is simulated with the same graphs and Poisson arrivals. The search changes one
    setting at a time, as long as any change is better: the largest batch of a cell, or the tasks
    that are submitted together.

    Args:
      cells: with all compiled sizes to choose from.
      graphs: a sample of requests; a few hundred of them for a 99th percentile.
      cost: for instance `jaxserve.cells.measure.measure_cells(cells)`.
      num_workers, max_in_flight, loop_length: see `simulate_cells`.
      seed: of the arrivals.

    Raises:
      InfeasibleBoundError: a request takes longer than the bound even if nothing else runs.
      InvalidConfigError: there are no graphs.
      JaxserveError: a graph of the sample cannot be served; for instance UnknownCellError.
    """
    if not graphs:
        raise InvalidConfigError("no graphs were given; pass a sample of requests")
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(size=len(graphs)))
    options = {
        "num_workers": num_workers,
        "max_in_flight": max_in_flight,
        "loop_length": loop_length,
    }
    search = _Search(cells, graphs, cost, latency_bound_s, quantile, arrivals, options)
    with tqdm(desc="planning", unit="run", leave=False, delay=2, disable=not progress) as bar:
        return search.run(bar)


@final
@dataclass
class _Search:
    cells: Sequence[BaseCell]
    graphs: Sequence[Graph]
    cost: TaskCost
    bound_s: float
    quantile: float
    arrivals: np.ndarray  # at one request a second
    options: Mapping[str, Any]  # of `simulate_cells`

    def run(self, bar: tqdm) -> CellPlan:
        choices = [cell.batch_sizes for cell in self.cells] + [_TASKS]
        settings = [sizes[-1] for sizes in choices[:-1]] + [_TASKS[-1]]
        smallest = [sizes[0] for sizes in choices]
        alone_s = min(self._alone_s(settings), self._alone_s(smallest))
        if alone_s > self.bound_s:
            raise InfeasibleBoundError(
                {"latency_bound_s": self.bound_s}, {"latency_bound_s": alone_s}
            )
        best, rate = settings, self._highest_rate(settings, 0.0, bar)
        is_better = True
        while is_better:
            is_better = False
            for which, values in enumerate(choices):
                for value in values:
                    changed = [*best[:which], value, *best[which + 1 :]]
                    found = self._highest_rate(changed, rate * (1 + _TOLERANCE), bar)
                    if found > rate:
                        best, rate, is_better = changed, found, True
        if rate == 0.0:
            raise InfeasibleBoundError(
                {"latency_bound_s": self.bound_s}, {"latency_bound_s": alone_s}
            )
        return CellPlan(
            batch_sizes={
                cell.name: tuple(size for size in cell.batch_sizes if size <= largest)
                for cell, largest in zip(self.cells, best, strict=False)
            },
            max_tasks_to_submit=best[-1],
            rate=rate,
            latency_s=self._latency_s(best, rate),
        )

    def _highest_rate(self, settings: list[int], least: float, bar: tqdm) -> float:
        """Return the highest rate that keeps the bound; 0 if it is below `least`."""
        high = len(self.graphs) / self._makespan_s(settings)
        low = max(least, high / 64)
        if low > high or not self._keeps(settings, low):
            return 0.0
        if self._keeps(settings, high):
            return high
        while high > low * (1 + _TOLERANCE):
            bar.update()
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self._keeps(settings, middle) else (low, middle)
        return low

    def _keeps(self, settings: list[int], rate: float) -> bool:
        return self._latency_s(settings, rate) <= self.bound_s

    def _latency_s(self, settings: list[int], rate: float) -> float:
        return float(np.quantile(self._latencies(settings, self.arrivals / rate), self.quantile))

    def _alone_s(self, settings: list[int]) -> float:
        """Return the quantile of latencies of requests that never overlap."""
        apart_s = np.arange(len(self.graphs)) * self.bound_s * 1e3
        return float(np.quantile(self._latencies(settings, apart_s), self.quantile))

    def _makespan_s(self, settings: list[int]) -> float:
        return float(np.max(self._latencies(settings, np.zeros(len(self.graphs)))))

    def _latencies(self, settings: list[int], arrivals_s: np.ndarray) -> list[float]:
        layout = CellLayout(
            [
                cell.resized([size for size in cell.batch_sizes if size <= largest])
                for cell, largest in zip(self.cells, settings, strict=False)
            ]
        )
        requests = list(zip(arrivals_s.tolist(), self.graphs, strict=True))
        policy = BatchMaker(max_tasks_to_submit=settings[-1])
        done = simulate_cells(
            layout, requests, policy, self.cost, max_tasks_to_submit=settings[-1], **self.options
        )
        found = []
        for completion in done.completions:
            if completion.error is not None:
                raise completion.error
            latency_s = completion.timing.latency_s
            assert latency_s is not None
            found.append(latency_s)
        return found
