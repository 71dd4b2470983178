"""Plans on the host which rows of a step each program of a GPU kernel attends for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from jaxtyping import Int

from jaxserve.core.config import EngineConfig
from jaxserve.kernels.paged_attention import Capacity, Plan, Tiling, plan, planned_tiling
from jaxserve.scheduling.plan import Row
from jaxserve.steps.packing import MixedBatch
from jaxserve.steps.step_function import Placement


@final
class AttentionPlanner:
    """Makes the attention `Plan` of every step of one configuration.

    Args:
      sliding_window: of all layers; None if layers differ, which balances the work less well.
    """

    def __init__(self, config: EngineConfig, tiling: Tiling, sliding_window: int | None):
        self._config = config
        self._tiling = tiling
        # Contexts are planned at their longest. A shorter one (steps in flight have delivered less,
        # or a loop is at its beginning) has a window that begins before the planned one.
        slack = 2 * config.max_decode_iterations * (1 + config.num_proposed)
        self._sliding_window = None if sliding_window is None else sliding_window + slack

    @classmethod
    def of(
        cls, config: EngineConfig, model_config: Any, place: Placement
    ) -> AttentionPlanner | None:
        """Return the planner of a placed model; None if no kernel needs plans."""
        if config.has_encoder:
            return None  # kernels that need plans have no bias by distance
        if not model_config.num_attention_layers:
            return None
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
            chunk_invariant=config.row_kernels is not None,
        )
        if tiling is None:
            return None
        window, *others = set(model_config.sliding_windows)
        return cls(config, tiling, None if others else window)

    def mixed(self, batch: MixedBatch) -> Plan:
        start, length = np.asarray(batch.start), np.asarray(batch.query_length)
        return self._plan(start, length, num_tokens=len(batch.token_row), is_decode=False)

    def decode(
        self,
        rows: Sequence[Row],  # the window's slots
        window: range,
        num_iterations: int = 1,
        num_proposed: int = 0,  # tokens that an iteration computes after the newest one of each row
        *,
        most_gained: int | None = None,
    ) -> Plan:
        """Return the plan of a decode loop over a window's slots, for its last step's contexts.

        Kernels attend to no key after a planned context, so it is the longest possible one. An
        iteration gives a row at most `most_gained` tokens, by default `num_proposed` + 1.
        """
        start, length = np.zeros((2, len(window)), np.int64)
        block = 1 + num_proposed
        before = (most_gained or block) * num_iterations - block
        for row in rows:
            start[row.slot - window.start] = row.start + before
            length[row.slot - window.start] = block
        start = np.minimum(start, self._config.max_context - block)
        num_tokens = block * len(window)
        return self._plan(start, length, num_tokens=num_tokens, is_decode=not num_proposed)

    def _plan(
        self,
        start: Int[np.ndarray, " rows"],
        length: Int[np.ndarray, " rows"],
        *,
        num_tokens: int,
        is_decode: bool,
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
