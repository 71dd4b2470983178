"""Which rows of a step each program of a GPU attends for, planned on the host beside the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.plan import Row
from jaxserve.steps.functions import MixedBatch
from jaxserve.steps.placement import Placement
from pallas_kernels.paged_attention import Capacity, Plan, Tiling, plan, planned_tiling


@final
class AttentionPlanner:
    """Makes the `Plan` of every step of one configuration.

    Args:
      sliding_window: that all layers have; None where some see everything, which costs balance.
    """

    def __init__(self, config: EngineConfig, tiling: Tiling, sliding_window: int | None):
        self._config = config
        self._tiling = tiling
        self._sliding_window = sliding_window

    @classmethod
    def of(
        cls, config: EngineConfig, model_config: Any, place: Placement
    ) -> AttentionPlanner | None:
        """Return the planner of a model where it is placed; None where no kernel needs plans."""
        shards = place.num_shards
        kv_heads = max(1, model_config.num_kv_heads // shards)
        tiling = planned_tiling(
            next(iter(place.whole.device_set)),
            config.attention,
            dtype=model_config.dtype,
            page_dtype=config.kv_dtype or model_config.dtype,
            kv_heads=kv_heads,
            group=model_config.num_heads // shards // kv_heads,
            head_dim=model_config.head_dim,
        )
        if tiling is None:
            return None
        window, *others = set(model_config.sliding_windows)
        return cls(config, tiling, None if others else window)

    def mixed(self, batch: MixedBatch) -> Plan:
        """Of a mixed step; the batch in NumPy arrays."""
        start, length = np.asarray(batch.start), np.asarray(batch.query_length)
        return self._plan(start, length, num_tokens=len(batch.token_row), is_decode=False)

    def decode(
        self, rows: Sequence[Row], window_start: int, num_rows: int, num_iterations: int = 1
    ) -> Plan:
        """Of the iterations of a decode loop, as long as contexts are in the last of them."""
        start, length = np.zeros((2, num_rows), np.int64)
        for row in rows:
            start[row.slot - window_start] = row.start + num_iterations - 1
            length[row.slot - window_start] = 1
        start = np.minimum(start, self._config.max_context - 1)
        return self._plan(start, length, num_tokens=num_rows, is_decode=True)

    def _plan(
        self, start: np.ndarray, length: np.ndarray, *, num_tokens: int, is_decode: bool
    ) -> Plan:
        capacity = Capacity.of(
            self._tiling,
            num_tokens=num_tokens,
            num_rows=len(length),
            max_context=self._config.max_context,
            is_decode=is_decode,
        )
        return plan(
            self._tiling,
            capacity,
            query_length=length,
            first_position=start,
            context_length=start + length,
            sliding_window=self._sliding_window,
        )
