"""Measurement of the time that cells take."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import jax

from jaxserve.cells.base import BaseCell
from jaxserve.cells.device import DeviceCells
from jaxserve.cells.layout import NUM_RESERVED_SLOTS, CellLayout
from jaxserve.cells.simulation import MeasuredTaskCost
from jaxserve.core.errors import InvalidConfigError

# Calls of an executable before those that are timed, the first of which compiles.
_NUM_UNTIMED = 2
# Between sizes from this one on, `sized` adds another one.
_FROM_SIZE = 8


def sized(
    cells: Sequence[BaseCell], device: Any = None, *, largest: int = 512, least_gain: float = 0.05
) -> list[BaseCell]:
    """Return cells with batches as large as pays off; create a runtime with them.

    The largest batch of each cell is doubled, and the new size added, as long as the time of a row
    decreases. Sizes halfway between those over 8 are added too, so that tasks have less padding.

    Args:
      device: see `measure_cells`.
      largest: the largest batch size.
      least_gain: the fraction by which a row's time must decrease with each doubling.

    Raises:
      InvalidCellError: two cells have one name.
    """
    candidates: list[list[int]] = []
    for cell in cells:
        sizes = [cell.batch_sizes[-1]]
        while 2 * sizes[-1] <= largest:
            sizes.append(2 * sizes[-1])
        candidates.append(sizes)
    timed = [cell.resized(sizes) for cell, sizes in zip(cells, candidates, strict=True)]
    seconds = measure_cells(timed, device).seconds
    found = []
    for cell in cells:
        sizes = (*cell.batch_sizes, *sizes_that_pay(seconds[cell.name], least_gain)[1:])
        halfway = [(a + b) // 2 for a, b in pairwise(sizes) if a >= _FROM_SIZE and b > a + 1]
        found.append(cell.resized(sorted({*sizes, *halfway})))
    return found


def sizes_that_pay(seconds: Mapping[int, float], least_gain: float) -> list[int]:
    """Return the first sizes, up to the one after which a row does not become cheaper.

    Args:
      seconds: size -> seconds of a task, in increasing order of sizes.
    """
    (last, last_s), *others = seconds.items()
    found = [last]
    for size, size_s in others:
        if size_s / size > (1 - least_gain) * last_s / last:
            break
        last, last_s = size, size_s
        found.append(size)
    return found


def measure_cells(
    cells: Sequence[BaseCell],
    device: Any = None,
    *,
    max_fused: int = 5,
    num_calls: int = 7,
    host_per_call_s: float = 0.0,
    host_per_task_s: float = 0.0,
) -> MeasuredTaskCost:
    """Return the seconds of every compiled size of cells on a device.

    Each is the median of several calls. Rows alternate between two slots, so the time to gather
    rows that are far apart is not included.

    Args:
      device: a device of JAX; by default its first.
      max_fused: tasks of one call, as of the runtime that is to be predicted.
      host_per_call_s, host_per_task_s: see `MeasuredTaskCost`; they are not measured here.

    Raises:
      InvalidCellError: two cells have one name.
      InvalidConfigError: an option is not allowed.
    """
    for name, value in (("max_fused", max_fused), ("num_calls", num_calls)):
        if value < 1:
            raise InvalidConfigError(f"{name}={value} is not allowed; pass at least 1")
    layout = CellLayout(cells)
    layout.require_names()
    executor = DeviceCells(
        layout,
        jax.devices()[:1] if device is None else [device],
        num_slots=[NUM_RESERVED_SLOTS + 1] * len(layout.pools),
        max_fused=max_fused,
    )
    seconds: dict[str, dict[int, float]] = {}
    for t in layout.types:
        sizes = seconds.setdefault(t.cell.name, {})
        for size in t.cell.batch_sizes:
            timed = [executor.time_tasks(t.index, size) for _ in range(_NUM_UNTIMED + num_calls)]
            sizes[size] = statistics.median(timed[_NUM_UNTIMED:])
    executor.close()
    return MeasuredTaskCost(seconds, host_per_call_s, host_per_task_s)
