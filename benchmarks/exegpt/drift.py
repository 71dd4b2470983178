"""Lengths that drift (figure 11 of ExeGPT), simulated: `python -m benchmarks.exegpt.drift --help`.

A task's answers first have the lengths that the schedule was planned for, and from some answer on
another mean, deviation or skewness. Three engines serve them: one that keeps its schedule, one that
adapts it, and one that was planned for the new lengths from the start. The paper's figure shows
WAA; a running engine can change RRA's schedule, so here it is RRA's.

The real scheduler runs on simulated steps, whose costs are rooflines. All answers wait from the
start. A table on stderr, one JSON object on stdout.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from tqdm import tqdm

from benchmarks.common.harness import Benchmark, numbers, option, some_of
from benchmarks.exegpt.baselines import StaticBatches
from benchmarks.exegpt.estimated import SCENARIO, skewed
from benchmarks.exegpt.scenarios import Scenario
from benchmarks.exegpt.step_cost import LayerStepCost
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.planning import simulate
from jaxserve.planning.schedules import (
    AllocationPolicy,
    Deployment,
    LatencyBounds,
    LengthDistribution,
    ParallelLayout,
    RRAPlanner,
    SchedulePlan,
    TaskLengths,
)
from jaxserve.planning.schedules.adaptation import Adaptation, AdaptingPilot
from jaxserve.planning.schedules.observed import AnswerLength
from jaxserve.scheduling.admission import OnDemand
from jaxserve.scheduling.order import FCFS
from jaxserve.scheduling.policy import Policy as ServingPolicy
from jaxserve.scheduling.retention import Stateless
from jaxserve.workload import WorkloadItem
from jaxserve.workload.tasks import TASKS, Lengths

STATISTICS = ("mean", "std", "skewness")
FACTORS = (0.7, 0.85, 1.15, 1.3)
SKEWNESSES = (-0.4, -0.2, 0.2, 0.4)
# Shares by which phases may last longer than their mean, as for plans from measured step times.
_MARGIN = 0.1
_PAGE_TOKENS = 32
_NUM_SLOTS = 512


@final
@dataclass(frozen=True)
class Drift:
    """New output lengths: one statistic changes, the rest stay.

    Attributes:
      name: one of `STATISTICS`.
      value: a factor of mean or deviation, or the skewness.
    """

    name: str
    value: float

    def probabilities(self, before: Lengths) -> np.ndarray:
        """Return the probabilities of the lengths 1, 2, 3, ..., at most `before.most`."""
        if self.name == "mean":
            return replace(before, mean=before.mean * self.value).probabilities()
        if self.name == "std":
            return replace(before, std=before.std * self.value).probabilities()
        return skewed(before, self.value).probabilities[1:]


@final
@dataclass(frozen=True)
class Setting:
    """One engine of a scenario, its bound, and the number of answers that it serves.

    Attributes:
      layout: that of the schedule without drift, which a running engine keeps.
      num_before, num_after: answers before the drift, and from the drift on.
    """

    deployment: Deployment
    layout: ParallelLayout
    bounds: LatencyBounds
    num_before: int
    num_after: int

    @classmethod
    def of(cls, scenario: Scenario, bound: str, num_before: int, num_after: int) -> Setting:
        """Return the setting of a scenario under a bound of `StaticBatches.bounds`."""
        names = ("10", "30", "70", "none")
        if bound not in names:
            raise InvalidConfigError(f"--bound {bound} is unknown; pass one of {', '.join(names)}")
        if min(num_before, num_after) < 1:
            raise InvalidConfigError(
                f"--before {num_before} --after {num_after} is not allowed; pass at least 1 each"
            )
        static = StaticBatches.of(scenario.deployment(), scenario.lengths())
        deployment = replace(
            scenario.deployment(),
            encode_margin=_MARGIN,
            decode_margin=_MARGIN,
            max_sequences=_NUM_SLOTS,
        )
        bounds = LatencyBounds(latency_s=static.bounds()[names.index(bound)])
        layouts = [ParallelLayout(policy=AllocationPolicy.RRA)]
        layouts += [
            ParallelLayout(
                policy=AllocationPolicy.RRA, degree=degree, num_sharded_devices=scenario.num_devices
            )
            for degree in deployment.cluster.degrees
            if degree > 1
        ]
        planner = RRAPlanner(deploy=lambda _: deployment, layouts=tuple(layouts))
        plan = planner.plan(scenario.lengths(), bounds, num_lengths=num_before)
        return cls(deployment, plan.schedule.layout, bounds, num_before, num_after)

    @property
    def planner(self) -> RRAPlanner:
        return RRAPlanner(deploy=lambda _: self.deployment, layouts=(self.layout,))

    def serve(
        self,
        lengths: Sequence[tuple[int, int]],
        plan: SchedulePlan,
        pilot: AdaptingPilot | None = None,
    ) -> dict[str, Any]:
        """Simulate answers of these lengths; return throughput and latencies after the drift.

        Answers count from the drift on, and again from the second half on ("settled"), except for
        the last ones, during which no new answers are admitted.
        """
        longest = max(map(sum, lengths))
        simulation = simulate(
            [
                WorkloadItem(prompt_token_ids=(1,) * prompt, num_output_tokens=output)
                for prompt, output in lengths
            ],
            ServingPolicy("rra", OnDemand(), FCFS(), plan.iteration(), Stateless()),
            EngineConfig(
                page_size=_PAGE_TOKENS,
                num_pages=_NUM_SLOTS * (longest // _PAGE_TOKENS + 2),
                max_slots=_NUM_SLOTS,
                max_context=longest + 1,
                max_step_tokens=64 * longest,
                max_decode_iterations=64,
            ),
            LayerStepCost.of_layout(self.deployment, self.layout),
            pilot=pilot,
            progress=False,
        )
        timings = [completion.timing for completion in simulation.completions]
        admitted = np.array([timing.admitted_s or 0.0 for timing in timings])
        ended = np.array([timing.finished_s or 0.0 for timing in timings])
        spent = ended - admitted
        first = len(lengths) - self.num_after
        last = len(lengths) - max(1, self.num_after // 8)
        parts = {"from_drift": first, "settled": first + self.num_after // 2}
        return {
            name: {
                "answers_per_s": (last - begin) / float(admitted[last] - admitted[begin]),
                "share_in_bound": float(np.mean(spent[begin:last] <= self.bounds.latency_s)),
                "p99_s": float(np.percentile(spent[begin:last], 99)),
            }
            for name, begin in parts.items()
        }


def measure(setting: Setting, drift: Drift, *, seed: int) -> dict[str, Any]:
    """Return the figures of the three engines when the lengths drift; see the module."""
    task, rng = TASKS[SCENARIO.task], np.random.default_rng(seed)
    before = _drawn(task.outputs.probabilities(), setting.num_before, rng)
    changed = drift.probabilities(task.outputs)
    after = _drawn(changed, setting.num_after, rng)
    num = setting.num_before + setting.num_after
    prompts = _drawn(task.inputs.probabilities(), num, rng)
    lengths = list(zip(prompts, [*before, *after], strict=True))
    planner, planned = setting.planner, TaskLengths.of_task(task)
    plan = planner.plan(planned, setting.bounds, num_lengths=setting.num_before)
    known = [
        AnswerLength(admitted_s=-math.inf, num_prompt=prompt, num_output=output)
        for prompt, output in _pairs(task, 2 * setting.num_before, rng)
    ]
    pilot = AdaptingPilot(Adaptation(planner, setting.bounds, plan=plan, answers=known))
    new = TaskLengths(planned.inputs, LengthDistribution(np.concatenate([[0.0], changed])))
    best = planner.nearest(new, setting.bounds, num_lengths=setting.num_after)
    return {
        "changed": drift.name,
        "to": drift.value,
        "left_alone": _schedule(plan) | setting.serve(lengths, plan),
        "adapted": setting.serve(lengths, plan, pilot)
        | {
            "adopted": [_schedule(each) | {"at_s": at_s} for at_s, each in pilot.adopted],
        },
        "planned_anew": _schedule(best) | setting.serve(lengths, best),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    setting = Setting.of(SCENARIO, options.bound, options.before, options.after)
    wanted = some_of(options.only, "--only", STATISTICS)
    factors = numbers(options.factors, "--factors")
    drifts = [
        Drift(name, value)
        for name in wanted
        for value in (SKEWNESSES if name == "skewness" else factors)
    ]
    return {
        "bound_s": None if math.isinf(setting.bounds.latency_s) else setting.bounds.latency_s,
        "drifts": [
            measure(setting, drift, seed=options.seed)
            for drift in tqdm(drifts, desc="drift", leave=False, delay=2)
        ],
    }


def _drawn(probabilities: np.ndarray, num: int, rng: np.random.Generator) -> list[int]:
    return rng.choice(np.arange(1, len(probabilities) + 1), num, p=probabilities).tolist()


def _pairs(task: Any, num: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    prompts = _drawn(task.inputs.probabilities(), num, rng)
    return list(zip(prompts, _drawn(task.outputs.probabilities(), num, rng), strict=True))


def _schedule(plan: SchedulePlan) -> dict[str, Any]:
    return {
        "encode_batch": plan.schedule.encode_batch,
        "num_decodes": plan.schedule.num_decodes,
        "expected_per_s": plan.answers_per_s,
        "expected_latency_s": plan.latency_s,
        "keeps_bound": plan.keeps_bounds,
    }


OPTIONS = (
    option("--bound", "30", "bottom 10, 30 or 70 %% of FasterTransformer, or none"),
    option("--before", 1000, "answers before the drift"),
    option("--after", 2000, "answers from the drift on"),
    option("--only", ",".join(STATISTICS), "statistics that change"),
    option("--factors", ",".join(map(str, FACTORS)), "of mean and deviation"),
    option("--seed", 0, "of the lengths"),
)
main = Benchmark(__doc__, run, OPTIONS, "exegpt_drift")


if __name__ == "__main__":
    sys.exit(main())
