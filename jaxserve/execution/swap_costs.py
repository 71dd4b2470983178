"""Costs of page swaps: measured in short pieces, and kept with the executables."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, final

import jax

from jaxserve.core.config import EngineConfig
from jaxserve.models.config import DecoderConfig
from jaxserve.scheduling.kv.swap_space import SwapCosts
from jaxserve.steps.step_function import Shelf, abstract

# Repetitions of each timing.
_TIMINGS = 3


def measured_costs(
    swap: Callable[[], None],
    prefill: Callable[[], None],
    *,
    num_pages: int,
    num_tokens: int,
    position_work: float,
) -> Iterator[SwapCosts | None]:
    """Yield None after each timing, and at last the costs.

    Each time is the minimum of a few timings, since other work of the host only adds to them.
    `swap` copies `num_pages` pages to the host and back, and `prefill` computes `num_tokens` tokens
    of a prompt; both wait for the end. `position_work` is relative to a token's other work.
    """
    times = []
    for step in (swap, prefill):
        step()  # compiles
        yield None
        found = []
        for _ in range(_TIMINGS):
            begin_s = time.perf_counter()
            step()
            found.append(time.perf_counter() - begin_s)
            yield None
        times.append(min(found))
    token_s = times[1] / num_tokens
    yield SwapCosts(
        page_s=times[0] / 2 / num_pages, token_s=token_s, position_s=token_s * position_work
    )


def work_of_a_position(models: Sequence[DecoderConfig], params: Any) -> float:
    """Return the FLOPs of attending to one position, relative to a token's other FLOPs.

    `params` are the whole model's, or their shapes; with stages, `models` has a part for each.
    """
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    width = sum(each.num_attention_layers * each.num_heads * each.head_dim for each in models)
    return 2 * width / num_params


@final
class KeptSwapCosts:
    """The stored swap costs of page caches and `settings`, on a shelf's device and executables."""

    def __init__(self, shelf: Shelf, config: EngineConfig, cache: Any, *settings: Any):
        leaves = jax.tree.leaves(abstract(cache))
        self._shelf = shelf
        self._key = shelf.key("swap costs", config.token_buckets, leaves, *settings)

    def load(self) -> SwapCosts | None:
        contents = self._shelf.read(self._key)
        return None if contents is None else SwapCosts(**json.loads(contents))

    def save(self, costs: SwapCosts) -> None:
        self._shelf.write(self._key, json.dumps(asdict(costs)).encode())


@final
class SwapCostMeter:
    """The swap costs of an executor: from an earlier start, or measured in short pieces.

    `timings` begins a measurement (`measured_costs`). `costs` is None until they are measured.
    """

    def __init__(
        self,
        kept: KeptSwapCosts,
        timings: Callable[[], Iterator[SwapCosts | None]],
        *,
        has_host_pages: bool,
    ):
        self.costs: SwapCosts | None = kept.load()
        self._kept = kept
        self._timings = timings
        self._has_host_pages = has_host_pages
        self._running: Iterator[SwapCosts | None] | None = None

    @property
    def is_missing(self) -> bool:
        """Whether there are host pages, and no costs yet."""
        return self._has_host_pages and self.costs is None

    def measure_on(self) -> None:
        """Do the next timing, and keep the costs after the last. An error ends the measurement."""
        self._running = self._running or self._timings()
        try:
            self.costs = next(self._running)
        except BaseException:
            self._has_host_pages, self._running = False, None
            raise
        if self.costs is not None:
            self._kept.save(self.costs)

    def measure(self) -> None:
        while self.is_missing:
            self.measure_on()

    def restart(self) -> None:
        """Drop the timings of a measurement that has not ended."""
        self._running = None
