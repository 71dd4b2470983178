"""Lengths that drift (figure 11 of ExeGPT), simulated: `python -m benchmarks.exegpt.drift --help`.

A task's answers first have the lengths that the schedule was planned for, and from some answer on
another mean, deviation or skewness. Three engines serve them: one that keeps its schedule, one that
adapts it, and one that was planned for the new lengths from the start. The paper's figure shows
WAA; a running engine can change RRA's schedule, so here it is RRA's.

The real scheduler runs on simulated steps, whose costs are rooflines. All answers wait from the
start.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from tqdm import tqdm

from benchmarks.common.counters import spent_s
from benchmarks.common.harness import Benchmark, numbers, option, some_of
from benchmarks.exegpt.baselines import StaticBatches
from benchmarks.exegpt.discrete import or_none, policy_of
from benchmarks.exegpt.estimated import SCENARIO, skewed
from benchmarks.exegpt.step_cost import LayerStepCost
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.planning import simulate
from jaxserve.planning.schedules import (
    AllocationPolicy,
    LatencyBounds,
    LengthDistribution,
    ParallelLayout,
    RRAPlanner,
    SchedulePlan,
    TaskLengths,
)
from jaxserve.planning.schedules.adaptation import Adaptation, AdaptingPilot
from jaxserve.planning.schedules.observed import AnswerLength
from jaxserve.workload import WorkloadItem
from jaxserve.workload.tasks import TASKS, Lengths

STATISTICS = ("mean", "std", "skewness")
FACTORS = (0.7, 0.85, 1.15, 1.3)
SKEWNESSES = (-0.4, -0.2, 0.2, 0.4)
BOUNDS = ("10", "30", "70", "none")  # of `StaticBatches.bounds`
# Shares by which phases may last longer than their mean, as for plans from measured step times.
_MARGIN = 0.1
_PAGE_TOKENS = 32
_NUM_SLOTS = 512


@final
@dataclass(frozen=True)
class Drift:
    """New output lengths: one statistic changes, the rest stay.

    Attributes:
      value: a factor of mean or deviation, or the skewness.
    """

    name: str
    value: float

    def probabilities(self, before: Lengths) -> np.ndarray:
        """Return the probabilities of the lengths 1, 2, 3, ..., at most `before.most`."""
        if self.name == "skewness":
            return skewed(before, self.value).probabilities[1:]
        changed = {self.name: self.value * getattr(before, self.name)}
        return replace(before, **changed).probabilities()


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.bound not in BOUNDS:
        raise InvalidConfigError(
            f"--bound {options.bound} is unknown; pass one of {', '.join(BOUNDS)}"
        )
    if min(options.before, options.after) < 1:
        raise InvalidConfigError(
            f"--before {options.before} --after {options.after} is not allowed; pass at least 1 "
            "each"
        )
    factors = numbers(options.factors, "--factors")
    drifts = [
        Drift(name, value)
        for name in some_of(options.only, "--only", STATISTICS)
        for value in (SKEWNESSES if name == "skewness" else factors)
    ]
    static = StaticBatches.of(SCENARIO.deployment(), SCENARIO.lengths())
    bound_s = static.bounds()[BOUNDS.index(options.bound)]
    engines = _Engines(options, LatencyBounds(latency_s=bound_s))
    bar = tqdm(drifts, desc="drift", leave=False, delay=2)
    return {"bound_s": or_none(bound_s), "drifts": [engines.measure(each) for each in bar]}


@final
class _Engines:
    def __init__(self, options: argparse.Namespace, bounds: LatencyBounds):
        self._options, self._bounds = options, bounds
        deployment = replace(
            SCENARIO.deployment(),
            encode_margin=_MARGIN,
            decode_margin=_MARGIN,
            max_sequences=_NUM_SLOTS,
        )
        layouts = tuple(
            ParallelLayout(
                policy=AllocationPolicy.RRA,
                degree=degree,
                num_sharded_devices=SCENARIO.num_devices if degree > 1 else 0,
            )
            for degree in deployment.cluster.degrees
        )
        every = RRAPlanner(deploy=lambda _: deployment, layouts=layouts)
        self._planned = SCENARIO.lengths()
        # A running engine keeps the layout of the schedule without drift.
        layout = self._plan(every).schedule.layout
        self._planner = RRAPlanner(deploy=lambda _: deployment, layouts=(layout,))
        self._cost = LayerStepCost.of_layout(deployment, layout)

    def _plan(self, planner: RRAPlanner) -> SchedulePlan:
        return planner.plan(self._planned, self._bounds, num_lengths=self._options.before)

    def measure(self, drift: Drift) -> dict[str, Any]:
        """Return the figures of the three engines when the lengths drift; see the module."""
        task, rng = TASKS[SCENARIO.task], np.random.default_rng(self._options.seed)
        num_before, num_after = self._options.before, self._options.after
        inputs, outputs = task.inputs.probabilities(), task.outputs.probabilities()
        changed = drift.probabilities(task.outputs)
        answers = [*_drawn(outputs, num_before, rng), *_drawn(changed, num_after, rng)]
        lengths = list(zip(_drawn(inputs, len(answers), rng), answers, strict=True))
        plan = self._plan(self._planner)
        earlier = (_drawn(each, 2 * num_before, rng) for each in (inputs, outputs))
        known = [
            AnswerLength(admitted_s=-math.inf, num_prompt=prompt, num_output=output)
            for prompt, output in zip(*earlier, strict=True)
        ]
        pilot = AdaptingPilot(Adaptation(self._planner, self._bounds, plan=plan, answers=known))
        outputs = LengthDistribution(np.concatenate([[0.0], changed]))
        new = TaskLengths(self._planned.inputs, outputs)
        best = self._planner.nearest(new, self._bounds, num_lengths=num_after)
        adapted = self._serve(lengths, plan, pilot)
        return {
            "changed": drift.name,
            "to": drift.value,
            "left_alone": _schedule(plan) | self._serve(lengths, plan),
            "adapted": adapted
            | {"adopted": [_schedule(each) | {"at_s": at_s} for at_s, each in pilot.adopted]},
            "planned_anew": _schedule(best) | self._serve(lengths, best),
        }

    def _serve(
        self, lengths: list[tuple[int, int]], plan: SchedulePlan, pilot: AdaptingPilot | None = None
    ) -> dict[str, Any]:
        """Simulate answers of these lengths; return throughput and latencies after the drift.

        Answers count from the drift on, and again from the second half on ("settled"), except for
        the last ones, during which no new answers are admitted.
        """
        longest, num_after = max(map(sum, lengths)), self._options.after
        simulation = simulate(
            [
                WorkloadItem(prompt_token_ids=(1,) * prompt, num_output_tokens=output)
                for prompt, output in lengths
            ],
            policy_of(plan.iteration()),
            EngineConfig(
                page_size=_PAGE_TOKENS,
                num_pages=_NUM_SLOTS * (longest // _PAGE_TOKENS + 2),
                max_slots=_NUM_SLOTS,
                max_context=longest + 1,
                max_step_tokens=64 * longest,
                max_decode_iterations=64,
            ),
            self._cost,
            pilot=pilot,
            progress=False,
        )
        done = simulation.completions
        admitted = np.array([each.timing.admitted_s or 0.0 for each in done])
        spent = spent_s(done)
        first, last = len(lengths) - num_after, len(lengths) - max(1, num_after // 8)
        return {
            name: {
                "answers_per_s": (last - begin) / float(admitted[last] - admitted[begin]),
                "share_in_bound": float(np.mean(spent[begin:last] <= self._bounds.latency_s)),
                "p99_s": float(np.percentile(spent[begin:last], 99)),
            }
            for name, begin in (("from_drift", first), ("settled", first + num_after // 2))
        }


def _drawn(probabilities: np.ndarray, num: int, rng: np.random.Generator) -> list[int]:
    return rng.choice(np.arange(1, len(probabilities) + 1), num, p=probabilities).tolist()


def _schedule(plan: SchedulePlan) -> dict[str, Any]:
    return {
        "encode_batch": plan.schedule.encode_batch,
        "num_decodes": plan.schedule.num_decodes,
        "expected_per_s": plan.answers_per_s,
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
