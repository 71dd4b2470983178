"""Policies over workloads and pools, simulated: `python -m benchmarks.policies.grid --help`.

Every policy serves the same requests, all at once, with the scheduler that serves on a device and
the step times of a roofline. The run takes minutes on any machine, and gives the same figures on
each.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.common.harness import Benchmark, option
from benchmarks.common.policies import parse_policies
from benchmarks.common.repeats import Figures
from jaxserve.core.metrics import summarise
from jaxserve.planning import simulate
from jaxserve.planning.arena import NoisyPredictor
from jaxserve.planning.step_roofline import A100, ModelShape, RooflineCost
from jaxserve.scheduling.policy import Policy
from jaxserve.workload import WorkloadItem
from jaxserve.workload.tasks import TASKS, task_items

# The presets with a distinct policy on one device group, except the slowest and the oracles.
POLICIES = (
    "fastertransformer,orca,flover,vllm_like,s3,exegpt_rra,pensieve,pensieve_device_only,auto"
)
BASELINE = "vllm_like"
# Share of the pages that all slots need on average.
POOLS = {"tight": 0.15, "middle": 0.4, "ample": 1.0}
# Llama 3 8B in bfloat16, copies at the speed that PCIe 4.0 x16 reaches.
COST = RooflineCost(
    model=ModelShape(num_params=8e9, num_layers=32, hidden_size=4096, group_size=4),
    roofs=replace(A100, link_bytes_per_s=25e9),
    page_tokens=32,
)
_MAX_CONTEXT, _MAX_OUTPUT, _NUM_PRIOR = 2048, 1024, 2000
# The error of predictions of `informed`: the standard deviation of the logarithm of a length.
_NOISE = {"none": None, "marginal": float("inf"), "informed": 0.7}


def run(options: argparse.Namespace) -> dict[str, Any]:
    policies = parse_policies(options.policies)
    workloads = options.workloads.split(",")
    cases = [
        (workload, pool, predictor, policy)
        for workload in workloads
        for pool in POOLS
        for policy in policies
        for predictor in (_NOISE if policy.name in ("auto", "s3") else ("none",))
    ]
    rows = [_row(*case, options) for case in tqdm(cases, unit="run", leave=False, delay=2)]
    baselines = {(r["workload"], r["pool"]): r for r in rows if r["policy"] == BASELINE}
    for row in rows:
        other = baselines.get((row["workload"], row["pool"]))
        if other is not None:
            row["over_baseline"] = {
                "output_tokens_per_s": row["output_tokens_per_s"] / other["output_tokens_per_s"],
                "latency_p99": row["latency_s"]["p99"] / other["latency_s"]["p99"],
            }
    return {"pools": POOLS, "baseline": BASELINE, "rows": rows}


def _row(
    workload: str, pool: str, predictor: str, policy: Policy, options: argparse.Namespace
) -> Figures:
    items = _items(workload, options.num_requests, options.seed)
    lengths = [len(item.prompt_token_ids) + item.num_output_tokens for item in items]
    num_pages = int(POOLS[pool] * options.max_slots * np.mean(lengths) / COST.page_tokens)
    config = COST.config(
        num_pages=max(num_pages, _MAX_CONTEXT // COST.page_tokens),
        num_host_pages=0 if options.no_host else num_pages,
        max_slots=options.max_slots,
        max_context=_MAX_CONTEXT,
    )
    noise = _NOISE[predictor]
    predict = NoisyPredictor(_prior(workload, options.seed), noise or math.inf, options.seed)
    done = simulate(
        items,
        policy,
        config,
        COST,
        predictions=None if noise is None else [predict(item) for item in items],
        swap_costs=COST.swap_costs(),
        chunk_cost=COST.chunk_cost(_MAX_CONTEXT),
        progress=False,
    )
    figures = summarise(done.completions, done.wall_s)
    kept = ("output_tokens_per_s", "latency_s", "normalised_latency_s", "time_to_first_token_s")
    counters = ("num_steps", "num_iterations", "num_preemptions", "num_recomputed", "num_pages_out")
    return {
        "workload": workload,
        "pool": pool,
        "policy": policy.name,
        "predictor": predictor,
        **{name: figures[name] for name in kept},
        "engine": {name: getattr(done.stats, name) for name in counters},
    }


@lru_cache
def _items(workload: str, num: int, seed: int) -> Sequence[WorkloadItem]:
    if workload != "sharegpt":
        return task_items(workload, num, vocab_size=1 << 30, seed=seed)
    from jaxserve.models.tokenizer import Tokenizer
    from jaxserve.workload import sharegpt

    return sharegpt.sample(
        num,
        seed,
        tokenizer=Tokenizer.of_model("smollm2-135m"),
        max_prompt_tokens=_MAX_CONTEXT - _MAX_OUTPUT,
        max_output_tokens=_MAX_OUTPUT,
    )


@lru_cache
def _prior(workload: str, seed: int) -> np.ndarray:
    """Return P(length) of answers of 1, 2, ... tokens, from other requests of the workload."""
    if workload != "sharegpt":
        return TASKS[workload].outputs.probabilities()
    lengths = [item.num_output_tokens for item in _items(workload, _NUM_PRIOR, seed + 1)]
    counts = np.bincount(lengths, minlength=_MAX_OUTPUT + 1)[1:] + 1.0
    return counts / counts.sum()


OPTIONS = (
    option("--policies", POLICIES, "separated by commas"),
    option("--workloads", "sharegpt,S,T,G,C1,C2", "separated by commas"),
    option("--num-requests", 256, "that arrive all at once"),
    option("--max-slots", 64, "most sequences at once"),
    option("--no-host", False, "no host memory: preempted KV is computed anew"),
    option("--seed", 0, "of the draws"),
)
main = Benchmark(__doc__, run, OPTIONS, "policies_grid")


if __name__ == "__main__":
    sys.exit(main())
