"""How much memory `auto` leaves free depends on what a preemption costs."""

from __future__ import annotations

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.core.prediction import LengthPrediction
from jaxserve.execution.step_cost import FlatCost
from jaxserve.planning import simulate
from jaxserve.scheduling.kv.costs import SwapCosts
from jaxserve.scheduling.presets import PRESETS
from jaxserve.workload import random_items
from predictor import LengthBuckets

CONFIG = EngineConfig(
    page_size=8, num_pages=33, max_slots=16, max_context=256, max_decode_iterations=8
)
# Of every answer only the longest and the shortest length is known.
ANY_LENGTH = LengthPrediction(LengthBuckets((0, 48)), np.ones(1))


def _num_preempted(token_s: float) -> int:
    items = random_items(
        64, num_prompt_tokens=16, num_output_tokens=48, min_output_tokens=1, vocab_size=99, seed=3
    )
    done = simulate(
        items,
        PRESETS["auto"],
        CONFIG,
        FlatCost(),
        predictions=[ANY_LENGTH] * len(items),
        swap_costs=SwapCosts(page_s=token_s, token_s=token_s),
        progress=False,
    )
    assert all(completion.error is None for completion in done.completions)
    return done.stats.num_preemptions


def test_a_pool_is_filled_where_preemptions_cost_little():
    """And fewer sequences are preempted where each of their tokens costs ten iterations."""
    assert _num_preempted(1e-2) < 0.5 * _num_preempted(1e-7)
