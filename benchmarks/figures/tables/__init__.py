"""A result into Markdown: every row that holds numbers links to the file they come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.figures.results import Result
from benchmarks.figures.tables import (
    cells,
    conversations,
    devices,
    exegpt,
    exegpt_drift,
    http,
    lengths,
    papers,
    pensieve,
    rollouts,
    serving,
)

HEADINGS = {
    "offline": "All requests at once",
    "policies": "Policies on one workload",
    "online": "Latency against load",
    "conversations": "Conversations that come back",
    "flover": "Flover's section VI",
    "simulate": "Predicted and measured",
    "predictor": "Predicted lengths of answers",
    "probe": "What is left of answers",
    "s3": "S3's models on its GPU, simulated",
    "pensieve": "Pensieve's models on its GPUs, simulated",
    "scattered": "Attention over scattered pages",
    "restore": "Coming back from the host",
    "startup": "From an empty process to the first token",
    "compile_times": "Compiling for a GPU",
    "loading": "Memory for loading a checkpoint",
    "planning": "The host's time a step",
    "sharding": "What plans send, and how full pipelines are",
    "gpu_check": "One GPU in ten minutes",
    "exegpt": "ExeGPT's models on its clusters, estimated and simulated",
    "exegpt_bounds": "Plans beside hand-tuned batch sizes",
    "exegpt_measured": "ExeGPT's schedules on devices, and simulated",
    "exegpt_drift": "Lengths that drift, simulated",
    "cells": "Cellular batching beside graph batching",
    "cells_host": "The host's work on cells",
    "roles": "Prompts and answers in separate replicas",
    "http": "What HTTP costs, and other servers",
    "structured": "What grammars cost",
    "policies_grid": "Policies over workloads and pools, simulated",
    "invariance": "Bits of a request in any two batches",
    "residual": "Log-probabilities of sampling beside the trainer's",
    "adapters": "What adapters cost",
    "speculation": "What speculation gains",
    "quality": "Quality of weights in few bits",
}
# Tables of one result each; offline results share a table.
_MAKE: dict[str, Callable[[Result, str], str]] = {
    "policies": serving.policies,
    "online": serving.online,
    "conversations": conversations.conversations,
    "flover": papers.flover,
    "simulate": serving.simulate,
    "predictor": lengths.predictor,
    "probe": lengths.probe,
    "s3": papers.s3,
    "pensieve": pensieve.tables,
    "scattered": conversations.scattered,
    "restore": conversations.restore,
    "startup": devices.startup,
    "compile_times": devices.compile_times,
    "loading": devices.loading,
    "planning": devices.planning,
    "sharding": devices.sharding,
    "gpu_check": devices.gpu_check,
    "exegpt": exegpt.tables,
    "exegpt_bounds": exegpt.bounds,
    "exegpt_measured": exegpt.measured,
    "exegpt_drift": exegpt_drift.drift,
    "cells": cells.tables,
    "cells_host": cells.host,
    "roles": devices.roles,
    "http": http.http,
    "structured": http.structured,
    "policies_grid": papers.policies_grid,
    "invariance": rollouts.invariance,
    "residual": rollouts.residual,
    "adapters": rollouts.adapters,
    "speculation": rollouts.speculation,
    "quality": devices.quality,
}


def tables(kind: str, results: Sequence[Result], link: Callable[[Result], str]) -> list[str]:
    """Return the Markdown of each result of a kind; the first of the offline ones has their table.

    Args:
      link: returns the address of the file as the page sees it.

    Raises:
      ResultFileError: a file lacks a field of its kind, or the runs of its figures.
    """
    if kind == "offline":
        return serving.offline(results, link)
    return [_MAKE[kind](result, link(result)) for result in results]
