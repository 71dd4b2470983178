"""The evaluation of section 7 of the ExeGPT paper, and the figures of its text and tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from jaxserve.planning.schedules import (
    CLUSTERS,
    MODELS,
    Deployment,
    TaskLengths,
    roofline_deployment,
)
from jaxserve.workload.tasks import TASKS

# Table 2: (model, cluster, devices).
DEPLOYMENTS = (
    ("GPT3-101B", "A100", 16),
    ("GPT3-175B", "A100", 16),
    ("T5-11B", "A40", 8),
    ("OPT-13B", "A40", 4),
    ("GPT3-39B", "A40", 16),
    ("GPT3-175B", "A40", 32),
    ("GPT3-341B", "A40", 48),
)
# Figures 6 and 8: small to mid-sized models, and large ones.
_SMALL, _LARGE = ("S", "T", "C1"), ("G", "C1", "C2")
_TASKS = {
    "T5-11B": _SMALL,
    "OPT-13B": _SMALL,
    "GPT3-39B": _SMALL,
    "GPT3-101B": _SMALL + _LARGE[:1] + _LARGE[2:],
    "GPT3-175B": _LARGE,
    "GPT3-341B": _LARGE,
}
# Throughput over FasterTransformer: figure 6 (section 7.3), figure 8 (7.4), all scenarios.
PAPER_MEAN_GAINS = {"small": 2.0, "large": 3.2, "all": 2.9}
# Table 6, OPT 13B and task S: bound in seconds -> policy, B_E, N_D, degree, latency, throughput.
PAPER_TABLE_6 = (
    (3.1, "waa", 4, 1, 2, 3.01, 22.41),
    (5.9, "waa", 10, 1, 2, 4.11, 23.76),
    (11.5, "rra", 52, 13, 4, 10.23, 25.23),
    (float("inf"), "rra", 49, 7, 4, 16.87, 26.15),
)


# Table 5, GPT-3 39B: task, tolerance, policy, variable -> percentage of points at which latency and
# throughput are not monotone.
PAPER_TABLE_5 = {
    (task, tolerance, policy, variable): figures
    for task, rows in {
        "S": (
            ((0.6, 2.3), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.8, 0.0)),
            ((0.6, 0.3), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.5, 0.0)),
            ((0.3, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.4, 0.0)),
        ),
        "T": (
            ((0.2, 0.1), (0.0, 0.0), (0.1, 0.0), (1.2, 0.0), (10.9, 0.0)),
            ((0.2, 0.0), (0.0, 0.0), (0.0, 0.0), (0.8, 0.0), (10.6, 0.0)),
            ((0.2, 0.0), (0.0, 0.0), (0.0, 0.0), (0.4, 0.0), (10.4, 0.0)),
        ),
    }.items()
    for tolerance, row in zip((0.02, 0.05, 0.10), rows, strict=True)
    for (policy, variable), figures in zip(
        (("rra", "B_E"), ("rra", "N_D"), ("waa", "B_E"), ("waa", "TP"), ("waa", "B_m")),
        row,
        strict=True,
    )
}


@final
@dataclass(frozen=True)
class Scenario:
    """A model on a cluster with a task."""

    model: str
    cluster: str
    num_devices: int
    task: str

    @property
    def figure(self) -> int | None:
        """6 for small to mid-sized models, 8 for large ones; None for neither."""
        if self.task not in _TASKS[self.model]:
            return None
        is_large = self.model in ("GPT3-175B", "GPT3-341B") or (
            self.model == "GPT3-101B" and self.task in ("G", "C2")
        )
        return 8 if is_large else 6

    @property
    def is_of_figure_7(self) -> bool:
        return (self.model, self.num_devices) == ("OPT-13B", 4)

    def named(self) -> dict[str, str | int | None]:
        return {
            "figure": self.figure,
            "model": self.model,
            "cluster": self.cluster,
            "num_devices": self.num_devices,
            "task": self.task,
        }

    def deployment(self) -> Deployment:
        cluster = CLUSTERS[self.cluster].of(self.num_devices)
        return roofline_deployment(MODELS[self.model], cluster)

    def lengths(self) -> TaskLengths:
        return TaskLengths.of_task(TASKS[self.task])


def scenarios(models: tuple[str, ...]) -> Iterator[Scenario]:
    """Yield the scenarios of figures 6 and 8 with these models."""
    for model, cluster, num_devices in DEPLOYMENTS:
        for task in _TASKS[model] if model in models else ():
            yield Scenario(model, cluster, num_devices, task)


def figure_7(models: tuple[str, ...]) -> Iterator[Scenario]:
    """Yield the scenarios of figure 7, which has every task, if its model is one of these."""
    for task in TASKS if "OPT-13B" in models else ():
        yield Scenario("OPT-13B", "A40", 4, task)
