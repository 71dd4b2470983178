"""Measured costs of page swaps, kept beside the executables for later starts."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, final

import jax

from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.kv.costs import SwapCosts
from jaxserve.steps.step_function import Shelf, abstract


@final
class KeptSwapCosts:
    """The entry of swap costs for a cache, on a device and with executables that a shelf names."""

    def __init__(self, shelf: Shelf, config: EngineConfig, cache: Any):
        leaves = jax.tree.leaves(abstract(cache))
        self._shelf = shelf
        self._key = shelf.key("swap costs", config.token_buckets, leaves)

    def load(self) -> SwapCosts | None:
        """Return the costs that an earlier start measured; None if there are none."""
        contents = self._shelf.read(self._key)
        return None if contents is None else SwapCosts(**json.loads(contents))

    def save(self, costs: SwapCosts) -> None:
        """Keep the costs for later starts."""
        self._shelf.write(self._key, json.dumps(asdict(costs)).encode())
