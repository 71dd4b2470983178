"""Measured step times, their profiler, and the simulator that uses them."""

from jaxserve.planning.profiler import measure, measure_groups
from jaxserve.planning.simulator import Simulation, simulate
from jaxserve.planning.step_times import (
    GroupCosts,
    GroupTimes,
    Origin,
    StepTimes,
    find_group_times,
    find_step_times,
    keep_group_times,
    keep_step_times,
)

__all__ = [
    "GroupCosts",
    "GroupTimes",
    "Origin",
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
