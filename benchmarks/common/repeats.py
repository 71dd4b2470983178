"""Whole runs of several contenders in turns, and the median and range of their figures.

Other work on the machine slows some runs and not others. Contenders that take turns are slowed
equally, and the range shows by how much. No figure is composed of parts of several runs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar, final

from benchmarks.common.harness import Option, option

T = TypeVar("T")
Figures = dict[str, Any]

REPEATS = 3


@final
@dataclass(frozen=True)
class Spread:
    """Median, least and largest of one figure over `num_runs` whole runs."""

    median: float
    low: float
    high: float
    num_runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the spread of at least one value; the median of two is their mean."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def over(self, unit: float) -> Spread:
        """Return the spread in multiples of `unit`."""
        return Spread(self.median / unit, self.low / unit, self.high / unit, self.num_runs)

    def overlaps(self, other: Spread) -> bool:
        """Return whether the ranges have a value in common."""
        return self.low <= other.high and other.low <= self.high


def repeats(what: str, default: int = REPEATS) -> Option:
    """Return `--repeats`; `what` names the contenders that take turns."""
    text = f"whole runs of every {what}, in turns; the median and the range are reported"
    return option("--repeats", default, text)


def take_turns(
    names: Sequence[str], repeats: int, play: Callable[[str], T], *, at: str = ""
) -> dict[str, list[T]]:
    """Return what each contender's runs give, with the contenders in turns.

    Args:
      at: where they run, such as a rate, for the line on stderr before each run.
    """
    runs: dict[str, list[T]] = {name: [] for name in names}
    for number, name in in_turns(names, repeats):
        label = f"{name}, {at}" if at else name
        print(f"run {number + 1} of {repeats}: {label}", file=sys.stderr)
        runs[name].append(play(name))
    return runs


def in_turns(names: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """Return the order of runs, (number of the run, name): A, B, C, A, B, C, ..."""
    return ((number, name) for number in range(repeats) for name in names)


def summary(runs: Sequence[Figures]) -> Figures:
    """Return the median of every number of the runs, their `range`, and the `runs` themselves.

    Args:
      runs: of one contender, at least one; nested dictionaries of the same keys. A number that is
        None in one run has neither median nor range. Of other values, those that are equal in all
        runs are kept next to the medians.

    Returns:
      The medians under the names of a run; `range` has [least, largest] under the same names,
        nested likewise.
    """
    return {**_medians(runs), "range": _ranges(runs), "runs": list(runs)}


def ratios(own: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return own over other for each pair of runs of one number, which ran next to each other.

    Runs that only one contender has, because another failed, do not count.
    """
    return [a / b for a, b in zip(own, other, strict=False)]


def ratio(
    runs: Mapping[str, Sequence[Figures]], figure: str, own: str, other: str
) -> dict[str, Any]:
    """Return the median and the range of a figure of one contender over that of another."""
    spread = Spread.of(ratios(*([run[figure] for run in runs[name]] for name in (own, other))))
    return {"median": spread.median, "range": [spread.low, spread.high]}


def _medians(runs: Sequence[Figures]) -> Figures:
    medians: Figures = {}
    for name, first in runs[0].items():
        values = [run[name] for run in runs]
        if all(isinstance(value, dict) for value in values):
            medians[name] = _medians(values)
        elif all(value == first for value in values):
            medians[name] = first
        elif _are_numbers(values):
            medians[name] = statistics.median(values)
        elif any(value is None for value in values):
            medians[name] = None
    return medians


def _ranges(runs: Sequence[Figures]) -> Figures:
    ranges: Figures = {}
    for name in runs[0]:
        values = [run[name] for run in runs]
        if all(isinstance(value, dict) for value in values):
            ranges[name] = _ranges(values)
        elif _are_numbers(values):
            ranges[name] = [min(values), max(values)]
    return ranges


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
