"""What papers report of their policies, simulated: `python -m benchmarks.published --help`.

Each paper has a workload of its own, drawn anew for each repeat. Every policy serves the same
requests with the real scheduler and the step times of a roofline. The figures are ratios to the
first policy of the paper.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from tqdm import tqdm

from benchmarks.common.harness import Benchmark, option, some_of
from benchmarks.common.repeats import Figures, repeats, summary
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sizes import parse_bytes
from jaxserve.planning.arena import NoisyPredictor, cost_of
from jaxserve.planning.simulator import Simulation, simulate
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.slos_serve import Bounds
from jaxserve.scheduling.trail import LimitedPreemption
from jaxserve.workload import WorkloadItem
from jaxserve.workload.conversations import FollowUp, Talk, Talks, UserTurn

# Mean tokens, the standard deviation of their logarithm, and the most.
_PROMPT, _ANSWER, _SPREAD, _LONGEST = 150, 300, 1.0, 1024
_MAX_CONTEXT = 16_384
_NUM_SAMPLES, _NUM_TURNS = 8, 8
_BOUNDS = Bounds()

# The requests of a workload, and what follows their answers.
Workload = tuple[Sequence[WorkloadItem], FollowUp | None]


@final
@dataclass(frozen=True, kw_only=True)
class Paper:
    """A figure of a paper.

    Attributes:
      workload: that of the runs here, in words.
      policies: by their names in the table; the baseline first.
      draws: returns the workload of a number of requests.
    """

    reports: str
    workload: str
    policies: dict[str, Policy]
    draws: Callable[[np.random.Generator, int], Workload]
    figures: Callable[[Simulation], Figures]


# ---- workloads ----


def _lengths(rng: np.random.Generator, mean: float, num: int) -> list[int]:
    drawn = rng.lognormal(math.log(mean) - _SPREAD**2 / 2, _SPREAD, num)
    return np.clip(np.ceil(drawn), 1, _LONGEST).astype(int).tolist()


def _tokens(rng: np.random.Generator, num: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, 1 << 30, num).tolist())


def _questions(rng: np.random.Generator, num: int, per_s: float = math.inf) -> Workload:
    """Return questions that arrive as a Poisson process, or all at once."""
    times_s = np.cumsum(rng.exponential(1 / per_s, num)).tolist()
    lengths = zip(_lengths(rng, _PROMPT, num), _lengths(rng, _ANSWER, num), strict=True)
    items = [
        WorkloadItem(
            prompt_token_ids=_tokens(rng, prompt),
            num_output_tokens=answer,
            max_tokens=_LONGEST,
            arrival_s=time_s,
        )
        for (prompt, answer), time_s in zip(lengths, times_s, strict=True)
    ]
    return items, None


def _programs(rng: np.random.Generator, num: int) -> Workload:
    """Return programs of eight turns, one every second, whose tools take a second (median)."""
    talks = []
    for number in range(-(-num // _NUM_TURNS)):
        added = _lengths(rng, 400, _NUM_TURNS)
        added[0] += 1500  # the description of the tools, and the task
        answers, tools_s = _lengths(rng, 80, _NUM_TURNS), rng.lognormal(0.0, 1.0, _NUM_TURNS)
        turns = tuple(
            UserTurn(token_ids=_tokens(rng, n), num_output_tokens=answer, reaction_s=float(tool_s))
            for n, answer, tool_s in zip(added, answers, tools_s, strict=True)
        )
        talks.append(Talk(turns=turns, arrival_s=float(number), conversation_id=f"{number}"))
    served = Talks(talks, max_tokens=_LONGEST)
    return served.items, served.follow_up


def _groups(rng: np.random.Generator, num: int) -> Workload:
    """Return groups of eight samples, all at once; the lengths of siblings differ by a quarter."""
    items = []
    for mean in _lengths(rng, _ANSWER, -(-num // _NUM_SAMPLES)):
        drawn = np.ceil(mean * rng.lognormal(0.0, 0.25, _NUM_SAMPLES))
        lengths = tuple(np.clip(drawn, 1, _LONGEST).astype(int).tolist())
        items.append(
            WorkloadItem(
                prompt_token_ids=_tokens(rng, _PROMPT),
                num_output_tokens=max(lengths),
                sample_lengths=lengths,
                max_tokens=_LONGEST,
                sampling=SamplingParams(n=_NUM_SAMPLES, temperature=1.0),
            )
        )
    return items, None


# ---- figures ----


def _latencies(done: Simulation) -> Figures:
    latencies_s = [each.timing.latency_s or 0.0 for each in done.completions]
    firsts_s = [each.timing.time_to_first_token_s or 0.0 for each in done.completions]
    return {
        "mean latency": float(np.mean(latencies_s)),
        "p50": float(np.quantile(latencies_s, 0.5)),
        "p99": float(np.quantile(latencies_s, 0.99)),
        "mean first token": float(np.mean(firsts_s)),
    }


def _within_bounds(done: Simulation) -> Figures:
    num_met = 0
    for each in done.completions:
        first_s, whole_s = each.timing.time_to_first_token_s or 0.0, each.timing.latency_s or 0.0
        token_s = (whole_s - first_s) / max(1, len(each.token_ids) - 1)
        num_met += first_s <= _BOUNDS.first_token_s and token_s <= _BOUNDS.token_s
    share = num_met / len(done.completions)
    return {"share within bounds": share, "a second within bounds": num_met / done.wall_s}


def _jobs(done: Simulation) -> Figures:
    begins: dict[str | None, float] = {}
    ends: dict[str | None, float] = {}
    for each in done.completions:
        begins.setdefault(each.conversation_id, each.timing.arrival_s)
        end_s = each.timing.finished_s or 0.0
        ends[each.conversation_id] = max(ends.get(each.conversation_id, 0.0), end_s)
    num_prompt = sum(len(each.prompt_token_ids) for each in done.completions)
    jobs_s = [end_s - begins[program] for program, end_s in ends.items()]
    return {
        "mean time of a program": float(np.mean(jobs_s)),
        "p99": float(np.quantile(jobs_s, 0.99)),
        "prompt tokens computed": num_prompt - done.stats.num_prefix_hit,
    }


def _rollout(done: Simulation) -> Figures:
    ends_s = [each.timing.finished_s or 0.0 for each in done.completions]
    return {
        "time of all": done.wall_s,
        "time after nine tenths of the groups": done.wall_s - float(np.quantile(ends_s, 0.9)),
    }


def _presets(*names: str) -> dict[str, Policy]:
    return {name: PRESETS[name] for name in names}


PAPERS = {
    "ltr": Paper(
        reports="2.8 times lower mean latency in chat than first come, first served (abstract)",
        workload="questions all at once",
        policies=_presets("vllm_like", "ltr", "shortest_predicted"),
        draws=_questions,
        figures=_latencies,
    ),
    "trail": Paper(
        reports="lower mean latency and time to the first token than vLLM (how much, could not be "
        "read here)",
        workload="questions, six a second",
        policies={
            **_presets("vllm_like", "trail"),
            "trail, c = 1": replace(PRESETS["trail"], order=LimitedPreemption(limit=1.0)),
        },
        draws=lambda rng, num: _questions(rng, num, 6.0),
        figures=_latencies,
    ),
    "slos_serve": Paper(
        reports="2.2 times the requests within bounds a device (abstract)",
        workload="questions, six a second",
        policies=_presets("vllm_like", "slos_serve", "auto"),
        draws=lambda rng, num: _questions(rng, num, 6.0),
        figures=_within_bounds,
    ),
    "cache_ttl": Paper(
        reports="over 8 times lower mean time of a job (abstract)",
        workload="programs of eight turns, one a second, with tools of 1 s (median)",
        policies=_presets("vllm_like", "pensieve_device_only", "cache_ttl", "auto"),
        draws=_programs,
        figures=_jobs,
    ),
    "seer": Paper(
        reports="up to 2.04 times the throughput of rollouts and 72 to 94 % less latency in the "
        "tail, by all of its parts together (abstract)",
        workload="groups of eight samples, all at once",
        policies=_presets("vllm_like", "seer", "auto"),
        draws=_groups,
        figures=_rollout,
    ),
}


# ---- runs ----


def run(options: argparse.Namespace) -> dict[str, Any]:
    names = some_of(options.papers, "--papers", PAPERS)
    total = sum(len(PAPERS[name].policies) for name in names) * options.repeats
    with tqdm(total=total, unit="run", delay=2, leave=False) as bar:
        return {"papers": {name: _compared(PAPERS[name], options, bar) for name in names}}


def _compared(paper: Paper, options: argparse.Namespace, bar: tqdm) -> dict[str, Any]:
    runs: dict[str, list[Figures]] = {name: [] for name in paper.policies}
    for seed in range(options.repeats):
        for name, policy in paper.policies.items():
            runs[name].append(_play(paper, policy, seed, options))
            bar.update()
    baseline = next(iter(runs.values()))
    return {
        "reports": paper.reports,
        "workload": paper.workload,
        "policies": {
            name: summary(
                [
                    {"figures": own, "over_baseline": {key: own[key] / other[key] for key in own}}
                    for own, other in zip(figures, baseline, strict=True)
                ]
            )
            for name, figures in runs.items()
        },
    }


def _play(paper: Paper, policy: Policy, seed: int, options: argparse.Namespace) -> Figures:
    cost = cost_of(options.model, options.device)
    num_pages = parse_bytes(options.kv_memory) // cost.page_bytes
    items, follow_up = paper.draws(np.random.default_rng(seed), options.num_requests)
    shares = np.bincount(_lengths(np.random.default_rng(seed), _ANSWER, 10_000))[1:] + 0.1
    predict = NoisyPredictor(shares / shares.sum(), options.prediction_error, seed)
    done = simulate(
        items,
        policy,
        cost.config(
            num_pages=num_pages,
            num_host_pages=num_pages,
            max_slots=options.max_slots,
            max_context=_MAX_CONTEXT,
        ),
        cost,
        predictions=[predict(item) for item in items],
        follow_up=follow_up,
        predict=predict,
        swap_costs=cost.swap_costs(),
        chunk_cost=cost.chunk_cost(_MAX_CONTEXT),
        progress=False,
    )
    return paper.figures(done)


OPTIONS = (
    option("--papers", ",".join(PAPERS), "separated by commas"),
    repeats("policy", 5),
    option("--num-requests", 128, "of each run; turns and samples count each"),
    option("--prediction-error", 0.7, "standard deviation of the logarithm of predicted lengths"),
    option("--model", "Llama-3-8B", "whose sizes give the times; weights are not needed"),
    option("--device", "A100", "whose roofline gives the times"),
    option("--kv-memory", "2GiB", "of the page pool; the host has as much again"),
    option("--max-slots", 16, "most sequences at once"),
)
main = Benchmark(__doc__, run, OPTIONS, "published")


if __name__ == "__main__":
    sys.exit(main())
