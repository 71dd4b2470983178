"""Where the time of a run of the tests goes, as tables: `python -m tests.common.time_table FILE`.

FILE is what `pytest --times FILE` wrote.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def room_of(line: Line) -> str:
    """Return the folder of tests/ that a test is in."""
    return line["test"].split("/")[1].partition("::")[0]


def kind_of(line: Line) -> str:
    """Return what a test does that takes time; the first that applies."""
    room = room_of(line)
    kinds = {
        "notebooks": room == "notebooks",
        "documentation": room == "docs",
        "starts processes": line["processes"] > 0,
        "compiles or interprets kernels": room == "pallas_kernels" and line["compiled"] > 0,
        "parity with PyTorch": line["torch"] and line["compiled"] > 0,
        "builds a runtime": line["runtimes"] > 0,
        "compiles programs": line["compiled"] > 0,
    }
    return next((kind for kind, applies in kinds.items() if applies), "pure Python")


def causes_of(line: Line) -> dict[str, float]:
    """Return the seconds of a test by cause. Threads that compile beside others count twice."""
    computing = max(0.0, line["own_cpu_s"] - line["trace_s"] - line["compile_s"])
    busy = line["own_cpu_s"] + line["children_cpu_s"]
    return {
        "compiling": line["compile_s"],
        "tracing": line["trace_s"],
        "other processes (CPU)": line["children_cpu_s"],
        "computing": computing,
        "waiting": max(0.0, line["wall_s"] - busy),
    }


def table(lines: list[Line], name: str, key: Callable[[Line], str]) -> str:
    """Return a table of minutes of the clock and of processors, most of the clock first."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for line in lines:
        cpu = line["own_cpu_s"] + line["children_cpu_s"]
        for row in (key(line), "all"):
            sums[row].update(tests=1, wall=line["wall_s"], cpu=cpu)
    rows = sorted(sums.items(), key=lambda item: (item[0] == "all", -item[1]["wall"]))
    cells = [
        f"| {row} | {s['tests']} | {s['wall'] / 60:.1f} | {s['cpu'] / 60:.1f} |" for row, s in rows
    ]
    return "\n".join([f"| {name} | tests | minutes | CPU minutes |", "|---|---|---|---|", *cells])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    lines = [json.loads(text) for text in parser.parse_args().file.read_text().splitlines()]
    causes: Counter[str] = Counter()
    for line in lines:
        causes.update(causes_of(line))
    print(table(lines, "room", room_of), table(lines, "kind", kind_of), sep="\n\n", end="\n\n")
    print("| cause | minutes |\n|---|---|")
    print("\n".join(f"| {cause} | {s / 60:.1f} |" for cause, s in causes.most_common()))


if __name__ == "__main__":
    main()
