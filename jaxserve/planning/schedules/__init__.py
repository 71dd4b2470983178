"""Schedules under latency bounds (ExeGPT): what they are expected to do, and which is best.

`search` finds the schedule with the highest throughput whose answers keep `LatencyBounds`, from a
`Deployment` (model, cluster, layer costs) and `TaskLengths`. `RRATimeline` and `WAATimeline`
estimate single configurations.

A `planner.SchedulePlanner` plans for one engine from its measured step times. There are four:
`RRAPlanner`, `continuous_planner.ContinuousPlanner`, `families.FamiliesPlanner`, which chooses
between the two, and `measured_waa.WAAPlanner` for two device groups.
"""

from jaxserve.planning.schedules.cluster import (
    CLUSTERS,
    MODELS,
    Cluster,
    DeviceRoofs,
    LayerShape,
    TransformerShape,
)
from jaxserve.planning.schedules.layer_cost import (
    Deployment,
    LayerCost,
    LayerPhase,
    RooflineLayerCost,
    Timeline,
    roofline_deployment,
)
from jaxserve.planning.schedules.lengths import LengthDistribution, TaskLengths, lengths_of
from jaxserve.planning.schedules.measured_cost import MeasuredCost, measured_deployment
from jaxserve.planning.schedules.plan import SchedulePlan
from jaxserve.planning.schedules.rra import RRATimeline
from jaxserve.planning.schedules.rra_planner import RRAPlanner
from jaxserve.planning.schedules.schedule import (
    AllocationPolicy,
    Estimates,
    LatencyBounds,
    ParallelLayout,
    PipelineStage,
    Points,
    Schedule,
)
from jaxserve.planning.schedules.search import SearchResult, search, timelines_of
from jaxserve.planning.schedules.waa import WAATimeline

__all__ = [
    "CLUSTERS",
    "MODELS",
    "AllocationPolicy",
    "Cluster",
    "Deployment",
    "DeviceRoofs",
    "Estimates",
    "LatencyBounds",
    "LayerCost",
    "LayerPhase",
    "LayerShape",
    "LengthDistribution",
    "MeasuredCost",
    "ParallelLayout",
    "PipelineStage",
    "Points",
    "RRAPlanner",
    "RRATimeline",
    "RooflineLayerCost",
    "Schedule",
    "SchedulePlan",
    "SearchResult",
    "TaskLengths",
    "Timeline",
    "TransformerShape",
    "WAATimeline",
    "lengths_of",
    "measured_deployment",
    "roofline_deployment",
    "search",
    "timelines_of",
]
