"""What section 7 of the ExeGPT paper evaluates, and the figures that its text and tables give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from jaxserve.planning.schedules import (
    CLUSTERS,
    DEPLOYMENTS,
    MODELS,
    Deployment,
    RooflineLayerCost,
    TaskLengths,
)
from jaxserve.workload.tasks import TASKS

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


@final
@dataclass(frozen=True)
class Scenario:
    """A model on a cluster with a task."""

    model: str
    cluster: str
    num_devices: int
    task: str

    @property
    def is_large(self) -> bool:
        """Whether it belongs to figure 8."""
        return self.model in ("GPT3-175B", "GPT3-341B") or (
            self.model == "GPT3-101B" and self.task in ("G", "C2")
        )

    def deployment(self) -> Deployment:
        cluster, model = CLUSTERS[self.cluster].of(self.num_devices), MODELS[self.model]
        return Deployment(model=model, cluster=cluster, cost=RooflineLayerCost(model, cluster))

    def lengths(self) -> TaskLengths:
        return TaskLengths.of_task(TASKS[self.task])


def scenarios(models: tuple[str, ...]) -> Iterator[Scenario]:
    """Yield the scenarios of figures 6 and 8 with these models."""
    for model, cluster, num_devices in DEPLOYMENTS:
        for task in _TASKS[model] if model in models else ():
            yield Scenario(model, cluster, num_devices, task)
