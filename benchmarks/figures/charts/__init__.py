"""A result into its pictures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from matplotlib.figure import Figure

from benchmarks.figures.charts import cells, exegpt, flover, pensieve, serving
from benchmarks.figures.results import Result

# Kinds whose tables say everything.
_TABLES_ONLY = (
    "policies_grid",
    *(
        "predictor",
        "probe",
        "s3",
        "scattered",
        "restore",
        "startup",
        "compile_times",
        "loading",
        "planning",
    ),
    *("sharding", "gpu_check", "exegpt_bounds", "exegpt_measured", "exegpt_drift"),
    *("roles", "invariance", "residual", "http", "structured", "adapters", "speculation"),
    *("quality", "cells_host"),
)


def charts(result: Result) -> dict[str, Callable[[Result], Figure]]:
    """Return what draws each figure, by its file name without ending.

    Figures are drawn inside `matplotlib.rc_context(style.RC)`, and raise ResultFileError if the
    file lacks a field of its kind.
    """
    stem = result.path.stem
    if result.kind in _TABLES_ONLY:
        return {}
    if result.kind == "flover":
        return {f"{stem}_{number}": chart for number, chart in flover.BY_NUMBER.items()}
    if result.kind == "offline":
        return {f"{stem}_peers": serving.peers} if result.has_peers else {}
    if result.kind == "exegpt":
        return {f"{stem}_{number}": chart for number, chart in exegpt.BY_NUMBER.items()}
    if result.kind == "cells":
        return {f"{stem}_{number}": chart for number, chart in cells.charts(result).items()}
    if result.kind == "pensieve":
        return {stem: pensieve.chart}
    if result.kind == "conversations":
        if "," not in result.get("arguments")["rates"]:
            return {}  # one rate makes no line
        return {
            f"{stem}_{number + 1}": partial(serving.conversations, number)
            for number, _ in result.items("sets")
        }
    if result.kind == "policies":
        drawn: dict[str, Callable[[Result], Figure]] = {stem: serving.policies}
        if serving.has_latency_split(result):
            drawn[f"{stem}_split"] = serving.latency_split
        return drawn
    return {stem: {"online": serving.online, "simulate": serving.simulate}[result.kind]}
