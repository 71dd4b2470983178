"""Plans against hand-tuned batches: `python -m benchmarks.exegpt.bounds --help`.

`rt.plan` and every policy with every batch size run on this machine; under each bound a policy
counts with the best size that keeps it. Each configuration is also simulated with the step times
measured for it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import numpy as np

from benchmarks.common import workloads
from benchmarks.common.counters import spent_s
from benchmarks.common.harness import Benchmark, option, whole_numbers
from benchmarks.common.repeats import repeats
from benchmarks.common.serving import Runtimes, measure
from benchmarks.exegpt.discrete import or_none
from jaxserve.core.errors import InfeasibleBoundError
from jaxserve.core.request import Completion
from jaxserve.scheduling.presets import get_policy

if TYPE_CHECKING:
    from jaxserve.planning import StepTimes
    from jaxserve.runtime import Runtime
    from jaxserve.scheduling.policy import Policy
    from jaxserve.workload import WorkloadItem

# Static batches, whose latencies give the bounds (section 7.1 of the paper).
STATIC = "fastertransformer"
PLANNED = "exegpt"
LEVEL = 0.99
_PERCENTILES = (10, 30, 70)
# Figures of a run that its simulation predicts.
_PREDICTED = ("answers_per_s", "p99_s")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of every policy and plan, the best under each bound, and the errors.

    The errors are those of the simulations.
    """
    options.max_slots = options.predictor = None
    whole_numbers(options.batches, "--batches")
    with Runtimes(options) as runtimes:
        session = _Session(options, runtimes)
        while session.num_rounds < options.repeats and session.has_time():
            session.play_round()
    return {
        "repeats": session.num_rounds,
        "is_whole": session.num_rounds == options.repeats,
        "tasks": {task: session.summary(task) for task in session.tasks},
        "simulated": session.simulated(),
        "runs": session.runs,
    }


def figures_of(done: Sequence[Completion], wall_s: float) -> dict[str, Any]:
    """Return throughput, and latencies from admission to end."""
    spent = spent_s(each for each in done if not each.error)
    return {
        "answers_per_s": len(spent) / wall_s,
        "tokens_per_s": sum(len(s.token_ids) for each in done for s in each.samples) / wall_s,
        "p99_s": float(np.quantile(spent, LEVEL)),
        "latencies_s": sorted(spent.tolist()),
    }


def missed_of(done: Sequence[Completion], bound_s: float, longest: int) -> dict[str, float]:
    """Return the share of answers longer than `longest`, and the late share of the rest."""
    others = spent_s(each for each in done if len(each.token_ids) <= longest)
    return {
        "longer_share": 1 - len(others) / len(done),
        "missed_share": int(np.sum(others > bound_s)) / max(1, len(others)),
    }


def bounds_of(p99_s: Sequence[float]) -> list[float]:
    """Return the bottom 10, 30 and 70 % of the latencies of static batches, and infinity."""
    return [*np.percentile(p99_s, _PERCENTILES).tolist(), math.inf]


def best_under(
    runs: Sequence[dict[str, Any]], policy: str, bound_s: float
) -> dict[str, Any] | None:
    """Return the batch size of a policy with the most throughput under a bound, or None.

    It compares medians over the runs of each batch size, of throughput and of p99.
    """
    by_batch: dict[int, list[dict[str, Any]]] = {}
    for each in runs:
        if each["policy"] == policy:
            by_batch.setdefault(each["batch"], []).append(each)
    tried = [{"batch": batch, **_medians(own)} for batch, own in by_batch.items()]
    kept = [each for each in tried if each["p99_s"] <= bound_s]
    return max(kept, key=lambda each: each["answers_per_s"], default=None)


def _medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    per_s = [each["answers_per_s"] for each in runs]
    return {
        "answers_per_s": statistics.median(per_s),
        "range": [min(per_s), max(per_s)],
        "p99_s": statistics.median(each["p99_s"] for each in runs),
        "num_runs": len(runs),
    }


@final
class _Session:
    """Whole rounds of runs: each has every policy, batch size and plan once.

    Every runtime stays open, with its own page pool.

    Attributes:
      runs: each with task, policy, batch, the number of its round, and the figures of the run;
        those of a plan with `bound_s` and the plan, and `failed` if no schedule keeps it.
    """

    def __init__(self, options: argparse.Namespace, runtimes: Runtimes):
        self.tasks, self.num_rounds = options.tasks.split(","), 0
        self.runs: list[dict[str, Any]] = []
        self._options, self._runtimes = options, runtimes
        self._batches = whole_numbers(options.batches, "--batches")
        self._policies = [STATIC, *options.policies.split(",")]
        self._opened: dict[tuple[str, int], Runtime] = {}
        self._times: dict[int, StepTimes] = {}  # of a task, by slots
        self._began_s = time.perf_counter()

    def has_time(self) -> bool:
        """Return whether a round of the mean duration so far ends within the budget."""
        budget_s = self._options.budget_s
        if budget_s is None or not self.num_rounds:
            return True
        spent_s = time.perf_counter() - self._began_s
        return spent_s * (1 + 1 / self.num_rounds) <= budget_s

    def play_round(self) -> None:
        """Play task by task: static batches, plans, other policies; every second round in reverse.

        So what is compared runs within minutes, and with step times of these minutes.
        """
        policies = [STATIC, PLANNED, *self._policies[1:]]
        for task in self.tasks:
            self._times.clear()
            for policy in reversed(policies) if self.num_rounds % 2 else policies:
                if policy == PLANNED:
                    self._play_plans(task)
                    continue
                for batch in self._batches:
                    preset = get_policy(policy)
                    rt = self._runtime(preset, batch)
                    asked = self._items(rt, task, self._options.seed)
                    self._play(rt, preset, asked, self._named(task, policy, batch))
        self.num_rounds += 1

    def _runtime(self, preset: Policy, batch: int) -> Runtime:
        known = preset.name, batch
        if known not in self._opened:
            self._opened[known] = self._runtimes.open(preset, max_slots=batch)
        return self._opened[known]

    def _named(self, task: str, policy: str, batch: int) -> dict[str, Any]:
        return {"task": task, "policy": policy, "batch": batch, "number": self.num_rounds}

    def _play_plans(self, task: str) -> None:
        batch, preset = max(self._batches), replace(get_policy("vllm_like"), name=PLANNED)
        rt, seed = self._runtime(preset, batch), self._options.seed
        self._times[batch] = rt.measure_step_times()
        asked = self._items(rt, task, seed)
        # A plan knows the lengths of other requests of the task.
        others = self._items(rt, task, seed + 1, self._options.known)
        known = [(len(each.prompt_token_ids), each.num_output_tokens or 1) for each in others]
        for bound_s in self.bounds(task):
            named = {**self._named(task, PLANNED, batch), "bound_s": or_none(bound_s)}
            try:
                plan = rt.plan(bound_s, lengths=known)
            except InfeasibleBoundError as error:
                lowest_s = error.lowest["latency_s"]
                self.runs.append(named | {"failed": str(error), "lowest_s": lowest_s})
                continue
            named |= {
                "family": plan.family,
                "max_running": plan.schedule.max_running,
                "estimate": plan.estimate,
                "encode_batch": plan.schedule.encode_batch,
                "num_decodes": plan.schedule.num_decodes,
                "planned_per_s": plan.answers_per_s,
                "planned_latency_s": plan.latency_s,
            }
            adopted, longest = replace(preset, iteration=plan.iteration()), plan.max_answer_tokens
            self._play(rt, adopted, asked, named, bound_s=bound_s, longest=longest)

    def bounds(self, task: str) -> list[float]:
        p99_s = [
            each["p99_s"]
            for each in self.runs
            if (each["task"], each["policy"], each["number"]) == (task, STATIC, 0)
        ]
        return bounds_of(p99_s) if p99_s else []

    def summary(self, task: str) -> list[dict[str, Any]]:
        runs = [each for each in self.runs if each["task"] == task]
        own = [each for each in runs if "failed" not in each]
        points = []
        for bound_s in self.bounds(task):
            shown_s = or_none(bound_s)
            tried = [r for r in runs if r["policy"] == PLANNED and r["bound_s"] == shown_s]
            planned = [run for run in tried if "failed" not in run]
            plan = None
            if 2 * len(planned) > len(tried):
                medians = ("within", "longer_share", "missed_share")
                firsts = ("family", "max_running", "encode_batch", "num_decodes")
                plan = {
                    **_medians(planned),
                    "num_failed": len(tried) - len(planned),
                    **{name: statistics.median(run[name] for run in planned) for name in medians},
                    **{name: planned[0][name] for name in firsts},
                }
            best = {policy: best_under(own, policy, bound_s) for policy in self._policies}
            points.append({"bound_s": shown_s, "best": best, PLANNED: plan})
        return points

    def simulated(self) -> dict[str, Any]:
        errors = [
            {name: each[name] for name in ("task", "policy", "batch")} | each["error"]
            for each in self.runs
            if "error" in each
        ]
        figures = {}
        for name in _PREDICTED if errors else ():
            sizes = [abs(each[name]) for each in errors]
            figures[name] = {"median": statistics.median(sizes), "most": max(sizes)}
        return {"configurations": errors, **figures}

    def _play(
        self,
        rt: Runtime,
        policy: Policy,
        asked: Sequence[WorkloadItem],
        named: dict[str, Any],
        *,
        bound_s: float = math.inf,
        longest: int | None = None,
    ) -> None:
        """Play a task once.

        Args:
          longest: output tokens of the longest answers for which a plan keeps the bound.
        """
        from jaxserve.planning import simulate

        label = " ".join(str(named[each]) for each in ("task", "policy", "batch", "number"))
        figures, done = measure(rt, asked, label=label)
        measured = figures_of(done, figures["wall_s"])
        latencies_s = measured.pop("latencies_s")
        run = named | measured
        run["within"] = sum(spent <= bound_s for spent in latencies_s) / len(latencies_s)
        if longest is not None:
            run |= missed_of(done, bound_s, longest)
        if self._options.simulate and not named["number"]:
            slots = rt.config.max_slots
            if slots not in self._times:
                self._times[slots] = rt.measure_step_times(rounds=1)
            times = self._times[slots]
            played = simulate(
                asked, policy, rt.config, times, chunk_cost=times.chunk_cost(), progress=False
            )
            predicted = figures_of(played.completions, played.wall_s)
            run["error"] = {name: predicted[name] / measured[name] - 1 for name in _PREDICTED}
        self.runs.append(run)
        print(
            f"{time.perf_counter() - self._began_s:6.0f} s  {label}: "
            f"{run['answers_per_s']:.3f} answers/s, p99 {run['p99_s']:.2f} s",
            file=sys.stderr,
        )

    def _items(
        self, rt: Runtime, task: str, seed: int, count: int | None = None
    ) -> list[WorkloadItem]:
        """Return requests of a task, whose lengths are forced and hidden."""
        workload = task if task == "sharegpt" else f"task:{task}"
        given = {**vars(self._options), "workload": workload, "seed": seed}
        if count is not None:
            given["num_requests"] = count
        return workloads.items(argparse.Namespace(**given), rt)


OPTIONS = (
    *workloads.options(num_requests=64, scale=0.25, output_scale=0.25),
    repeats("policy and batch size", 2),
    option("--tasks", "sharegpt,S,T,G,C1,C2", "separated by commas"),
    option("--policies", "orca,vllm_like,auto", "in addition to static batches and the plan"),
    option("--batches", "4,8,16", "sizes that every policy is tuned over"),
    option("--known", 1000, "other requests whose lengths a plan knows"),
    option("--budget-s", None, "begin no round that would end later; the first always runs", float),
    option(
        "--no-simulation",
        False,
        "do not simulate each configuration, which takes the measuring of its step times",
        action="store_false",
        dest="simulate",
    ),
    option("--model", "smollm2-135m", "a name, folder or GGUF file"),
    option("--kv-memory", "512MB", "size of each page pool"),
    option("--max-context", 1024, "most tokens of prompt and answer"),
)
main = Benchmark(__doc__, run, OPTIONS, "exegpt_bounds", is_whole=lambda _: True)


if __name__ == "__main__":
    sys.exit(main())
