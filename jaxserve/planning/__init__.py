"""Measured step times, their profiler, and the simulator that uses them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.planning.simulator import Simulation, simulate
    from jaxserve.planning.step_times import GroupCosts, GroupTimes, StepTimes

__all__ = ["GroupCosts", "GroupTimes", "Simulation", "StepTimes", "simulate"]


def __getattr__(name: str) -> Any:
    """Import names on first use: a runtime that plans nothing needs no simulator."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "simulator" if name in ("Simulation", "simulate") else "step_times"
    return getattr(import_module(f"{__name__}.{home}"), name)
