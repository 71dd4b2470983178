"""Replicas' steps, seen as those of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxserve.engine.recorder import StepRecord


def over_replicas(steps: Sequence[StepRecord], value: Callable[[StepRecord], int]) -> list[int]:
    """After each step, the sum of its own value and of the other replicas' latest."""
    latest: dict[int, int] = {}
    sums = []
    for step in steps:
        latest[step.replica] = value(step)
        sums.append(sum(latest.values()))
    return sums
