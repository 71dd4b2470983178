"""Prediction of what a schedule does: measured step times, and a simulator that uses them."""

from jaxserve.planning.group_times import GroupCosts, GroupTimes, measure_groups
from jaxserve.planning.profiler import measure
from jaxserve.planning.roofline import DeviceRoofs, ModelShape, RooflineCost
from jaxserve.planning.saved_times import (
    find_group_times,
    find_step_times,
    keep_group_times,
    keep_step_times,
)
from jaxserve.planning.simulator import Simulation, simulate
from jaxserve.planning.step_times import Origin, StepTimes

__all__ = [
    "DeviceRoofs",
    "GroupCosts",
    "GroupTimes",
    "ModelShape",
    "Origin",
    "RooflineCost",
    "Simulation",
    "StepTimes",
    "find_group_times",
    "find_step_times",
    "keep_group_times",
    "keep_step_times",
    "measure",
    "measure_groups",
    "simulate",
]
