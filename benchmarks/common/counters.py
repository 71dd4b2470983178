"""Counters of an engine over one run, and its prefix cache figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, final

import numpy as np

if TYPE_CHECKING:
    from jaxserve.core.request import Completion
    from jaxserve.engine.recorder import StepRecord
    from jaxserve.planning import Simulation

# Fields of statistics that are sizes; every other number grows with the steps.
_SIZES = (
    *("num_pages", "max_pages_owned", "page_size", "pool_bytes", "weights_bytes", "step_bytes"),
)


def counters_of(stats: Any) -> dict[str, float]:
    """Return the public numbers of a statistics dataclass by name."""
    values = {
        field.name: getattr(stats, field.name)
        for field in fields(stats)
        if not field.name.startswith("_")
    }
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return the counters of the time between two states, and the current sizes."""
    return {name: v if name in _SIZES else v - before[name] for name, v in now.items()}


def spent_s(done: Iterable[Completion]) -> np.ndarray:
    """Return the seconds of each completion from its admission to its end."""
    timings = [each.timing for each in done]
    return np.array([(one.finished_s or 0.0) - (one.admitted_s or 0.0) for one in timings])


def average_batch(steps: Sequence[StepRecord]) -> float:
    """Return the mean number of sequences that an iteration advances."""
    num_iterations = sum(step.num_iterations for step in steps)
    return sum(step.num_rows * step.num_iterations for step in steps) / max(1, num_iterations)


def of_simulation(done: Simulation) -> dict[str, Any]:
    """Return the figures of a simulated run that `serving.measure` reports beside the latencies."""
    return {"average_batch": average_batch(done.steps), "engine": counters_of(done.stats)}


_PREFIX_NAMES = (
    *("num_prefix_queried", "num_prefix_hit"),
    *("num_prefix_hit_on_host", "num_evicted_tokens"),
)
_FORMER_PREFIX_NAMES = ("num_sought", "num_found", "num_found_on_host", "num_lost")


@final
@dataclass(frozen=True)
class PrefixCounts:
    """Prompt tokens in whole pages of the sequences that began.

    Attributes:
      queried: tokens that were looked up in the cache.
      hit: of these, tokens whose KV was cached; `hit_on_host` of these on the host.
      evicted: tokens whose KV had been cached and was evicted before.
    """

    queried: float
    hit: float
    hit_on_host: float
    evicted: float

    @classmethod
    def of(cls, engine: Mapping[str, float]) -> PrefixCounts:
        """Read the counts from an engine's counters, also under the names of older result files."""
        names = _PREFIX_NAMES if "num_prefix_queried" in engine else _FORMER_PREFIX_NAMES
        return cls(*(engine[name] for name in names))

    @property
    def hit_share(self) -> float:
        return self.hit / max(1.0, self.queried)

    @property
    def hit_on_host_share(self) -> float:
        return self.hit_on_host / max(1.0, self.queried)
