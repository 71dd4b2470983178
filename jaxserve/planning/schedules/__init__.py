"""Schedules under latency bounds (ExeGPT): what they are expected to do, and which is best.

`search.search` finds the schedule with the highest throughput whose answers keep `LatencyBounds`,
from a `Deployment` (model, cluster, layer costs) and `TaskLengths`. `RRATimeline` and `WAATimeline`
estimate single configurations.

A `planner.SchedulePlanner` plans for one engine from its measured step times. There are four:
`RRAPlanner`, `continuous_planner.ContinuousPlanner`, `families.FamiliesPlanner`, which chooses
between the two, and `measured_waa.WAAPlanner` for two device groups.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.planning.schedules.cluster import CLUSTERS, MODELS, DeviceRoofs, TransformerShape
    from jaxserve.planning.schedules.layer_cost import Deployment, Timeline, roofline_deployment
    from jaxserve.planning.schedules.lengths import LengthDistribution, TaskLengths, lengths_of
    from jaxserve.planning.schedules.plan import SchedulePlan
    from jaxserve.planning.schedules.rra import RRATimeline
    from jaxserve.planning.schedules.rra_planner import RRAPlanner
    from jaxserve.planning.schedules.schedule import (
        AllocationPolicy,
        Estimates,
        LatencyBounds,
        ParallelLayout,
        Points,
        Schedule,
    )
    from jaxserve.planning.schedules.search import SearchResult, timelines_of
    from jaxserve.planning.schedules.waa import WAATimeline

__all__ = [
    "CLUSTERS",
    "MODELS",
    "AllocationPolicy",
    "Deployment",
    "DeviceRoofs",
    "Estimates",
    "LatencyBounds",
    "LengthDistribution",
    "ParallelLayout",
    "Points",
    "RRAPlanner",
    "RRATimeline",
    "Schedule",
    "SchedulePlan",
    "SearchResult",
    "TaskLengths",
    "Timeline",
    "TransformerShape",
    "WAATimeline",
    "lengths_of",
    "roofline_deployment",
    "timelines_of",
]

# Module -> names.
_HOMES = {
    "cluster": ("CLUSTERS", "MODELS", "DeviceRoofs", "TransformerShape"),
    "layer_cost": ("Deployment", "Timeline", "roofline_deployment"),
    "lengths": ("LengthDistribution", "TaskLengths", "lengths_of"),
    "plan": ("SchedulePlan",),
    "rra": ("RRATimeline",),
    "rra_planner": ("RRAPlanner",),
    "schedule": (
        "AllocationPolicy",
        "Estimates",
        "LatencyBounds",
        "ParallelLayout",
        "Points",
        "Schedule",
    ),
    "search": ("SearchResult", "timelines_of"),
    "waa": ("WAATimeline",),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import names on first use: a runtime that plans nothing needs no search."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
