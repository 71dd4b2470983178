"""Attention over a paged KV cache; `paged_attention` is the public function."""

from jaxserve.kernels.paged_attention.api import IMPLEMENTATIONS, paged_attention
from jaxserve.kernels.paged_attention.operands import Rows
from jaxserve.kernels.paged_attention.planner import Capacity, Launches, Plan, Tiling, no_work, plan
from jaxserve.kernels.paged_attention.tilings import planned_tiling, tiling_for

__all__ = [
    "IMPLEMENTATIONS",
    "Capacity",
    "Launches",
    "Plan",
    "Rows",
    "Tiling",
    "no_work",
    "paged_attention",
    "plan",
    "planned_tiling",
    "tiling_for",
]
