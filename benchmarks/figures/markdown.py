"""Cells, captions and tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.repeats import Spread
from benchmarks.figures.results import Result


def caption(result: Result, what: str, link: str, *, how: str | None = None) -> str:
    """Return what a table shows, on which machine, from which file, and from how many runs.

    Args:
      how: in place of the number of runs, for figures that do not come from repeated runs.
    """
    note = result.data.get("note")
    sentences = f"{what}, on {where(result)} ([{result.path.stem}]({link})); {how or runs(result)}."
    return f"{sentences} {note}" if note else sentences


def runs(result: Result) -> str:
    """Return how many whole runs the figures come from."""
    if result.repeats == 1:
        return "one run"
    return f"medians of {result.repeats} whole runs (least to most)"


def shown(spread: Spread, form: str, unit: str = "", link: str | None = None) -> str:
    """Return median and range; the range is left out where it rounds to the median.

    Args:
      link: of the file that the number comes from.
    """
    median, low, high = (format(value, form) for value in (spread.median, spread.low, spread.high))
    text = f"{median}{unit}" if link is None else f"[{median}]({link}){unit}"
    return text if low == high == median else f"{text} ({low} to {high})"


def linked(value: float, form: str, link: str) -> str:
    """Return a number that links to the file that it comes from."""
    return f"[{value:{form}}]({link})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table without the columns that are empty in every row."""
    kept = [i for i in range(len(header)) if not rows or any(row[i] for row in rows)]
    lines = [[line[i] for i in kept] for line in (header, ["---"] * len(header), *rows)]
    return "\n".join(
        "|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in lines
    )


def where(result: Result) -> str:
    """Return the machine in words."""
    device = result.get("device")
    if result.get("device", "platform") != "cpu":
        return f"{device['count']} x {device['kind']}"
    return f"{device['host_cores']} cores of {device['host_cpu']}"
