"""Sums over replicas of the values that their steps record."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxserve.engine.recorder import StepRecord


def over_replicas(steps: Sequence[StepRecord], value: Callable[[StepRecord], int]) -> list[int]:
    """Return, for each step, the sum of its value and the other replicas' latest values."""
    latest: dict[int, int] = {}
    sums = []
    for step in steps:
        latest[step.replica] = value(step)
        sums.append(sum(latest.values()))
    return sums
