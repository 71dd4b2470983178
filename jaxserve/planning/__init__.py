"""Measured step times, their profiler, and the simulator that uses them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    **dict.fromkeys(("measure", "measure_groups"), "profiler"),
    **dict.fromkeys(("Simulation", "simulate"), "simulator"),
}


def __getattr__(name: str) -> Any:
    """Import names on first use: a runtime that plans nothing needs no profiler or simulator."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'step_times')}"), name)
