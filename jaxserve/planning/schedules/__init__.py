"""Schedules under latency bounds (ExeGPT): what they are expected to do, and which is best.

`search` finds the schedule with the highest throughput whose answers keep `LatencyBounds`, from a
`Deployment` (model, cluster, layer costs) and `TaskLengths`. `RRATimeline` and `WAATimeline`
estimate single configurations.

A `planner.SchedulePlanner` plans for one engine from its measured step times. There are four:
`RRAPlanner`, `continuous_planner.ContinuousPlanner`, `families.FamiliesPlanner`, which chooses
between the two, and `measured_waa.WAAPlanner` for two device groups.
"""

from jaxserve.planning.schedules.clusters import CLUSTERS, DEPLOYMENTS, Cluster
from jaxserve.planning.schedules.configuration import Layout, Points, Policy, Schedule, Stage
from jaxserve.planning.schedules.estimates import Estimates, LatencyBounds
from jaxserve.planning.schedules.lengths import LengthDistribution, TaskLengths, lengths_of
from jaxserve.planning.schedules.measured_cost import MeasuredCost, measured_deployment
from jaxserve.planning.schedules.models import MODELS, LayerShape, TransformerShape
from jaxserve.planning.schedules.monotone import monotone_search
from jaxserve.planning.schedules.plan import Plan
from jaxserve.planning.schedules.roofline_cost import RooflineLayerCost, roofline_deployment
from jaxserve.planning.schedules.rra import RRATimeline
from jaxserve.planning.schedules.rra_planner import RRAPlanner
from jaxserve.planning.schedules.search import Choice, search, timelines_of
from jaxserve.planning.schedules.timeline import Deployment, LayerCost, Phase, Timeline
from jaxserve.planning.schedules.waa import WAATimeline

__all__ = [
    "CLUSTERS",
    "DEPLOYMENTS",
    "MODELS",
    "Choice",
    "Cluster",
    "Deployment",
    "Estimates",
    "LatencyBounds",
    "LayerCost",
    "LayerShape",
    "Layout",
    "LengthDistribution",
    "MeasuredCost",
    "Phase",
    "Plan",
    "Points",
    "Policy",
    "RRAPlanner",
    "RRATimeline",
    "RooflineLayerCost",
    "Schedule",
    "Stage",
    "TaskLengths",
    "Timeline",
    "TransformerShape",
    "WAATimeline",
    "lengths_of",
    "measured_deployment",
    "monotone_search",
    "roofline_deployment",
    "search",
    "timelines_of",
]
