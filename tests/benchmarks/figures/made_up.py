"""Small result files with made-up numbers, for kinds whose sentences and charts tests know."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.environment import ROOT
from benchmarks.common.repeats import Figures, summary
from benchmarks.figures.__main__ import README, RESULTS, load
from benchmarks.figures.tables import PAGES

HERE = {"device": {"platform": "cpu", "kind": "cpu", "host_cpu": "a CPU", "host_cores": 2}}
POLICIES = ("concurrent_instances", "fastertransformer", "orca", "vllm_like", "flover", "auto")
ARGUMENTS = {
    "num_requests": 4,
    "max_requests": 4,
    "workload": "uniform",
    "arrivals": "all",
    "output_tokens": 8,
    "model": "a-model",
}


def _figures(speed: float) -> dict[str, Any]:
    spread = {"mean": 8 / speed, "p50": 7 / speed, "p90": 9 / speed, "p99": 9.5 / speed}
    return {
        "num_requests": 4,
        "wall_s": 100 / speed,
        "output_tokens_per_s": 11.0 * speed,
        "requests_per_s": 0.3 * speed,
        "latency_s": spread,
        "normalised_latency_s": {"p50": 0.2 / speed, "p90": 0.4 / speed},
        "time_to_first_token_s": spread,
    }


def _three(speed: float) -> Figures:
    """Return three runs: one, one at half the speed, and one a quarter faster."""
    return summary([_figures(speed), _figures(speed / 2), _figures(speed * 1.25)])


def results() -> dict[str, dict[str, Any]]:
    """Return small results by kind; those of other kinds are in benchmarks/results."""
    speeds = {policy: 1.0 + 2 * i for i, policy in enumerate(POLICIES)}
    points = {
        policy: {
            "points": [
                {"rate": rate, **_figures(speed), "requests_per_s": min(rate, speed)}
                | {"goodput": {"share": 0.5, "requests_per_s": rate / 2}}
                for rate in (0.5, 1.0, 2.0)
            ]
        }
        for policy, speed in speeds.items()
    }
    engines: dict[str, Any] = {
        name: {
            **summary(
                [
                    {
                        "output_tokens_per_s": rate * speed,
                        "jaxserve_is_faster_by": 1 / speed,
                        "startup_s": 3.0,
                    }
                    for rate in (321.0, 330.0, 300.0)
                ]
            ),
            "error": None,
        }
        for name, speed in {"jaxserve": 1.0, "a_peer": 0.5, "fast": 2.0}.items()
    }
    engines["lost"] = {"output_tokens_per_s": None, "runs": [], "error": "no wheel\nfor it"}
    offline = {
        "repeats": 1,
        **summary([{**_figures(12.0), "host_gap_share": 0.01}]),
        **{"workload": "sharegpt", "model": "a-model", "precision": "float32", "policy": "auto"},
        "startup": None,
        "bound": {"reached": 0.75, "output_tokens_per_s": 400.0},
        "compare": {"engines": engines, "repeats": 3},
    }
    policies = {policy: _three(speed) for policy, speed in speeds.items()}
    s3 = {"output_tokens_per_s": 5.0, "average_batch": 4.0, "num_iterations": 3}
    faster = {"output_tokens_per_s": 8.0}
    made = {
        "offline": offline,
        "policies": {"repeats": 3, "policies": policies, "arguments": ARGUMENTS},
        "online": {"repeats": 1, "policies": points, "arguments": ARGUMENTS},
        "s3": {
            "arguments": ARGUMENTS,
            "models": {"a model": {"orca": s3, "auto": s3, "s3_oracle": {**s3, **faster}}},
            "paper": {"a model": {"average_batch": [1.0, 2.0, 3.0]}},
            "slo": {"a model": {"orca": [{"requests_within_per_s": 0.5}]}},
        },
        "roles": {
            "repeats": 2,
            "arguments": {
                **{"num_requests": 4, "prompt_tokens": 70, "output_tokens": 8},
                "arrivals": "poisson:2",
            },
            "fleets": {
                fleet: summary([_fleet(speed), _fleet(2 * speed)])
                for fleet, speed in (("roles", 2.0), ("whole", 1.0))
            },
        },
        "gpu_check": {
            "bars": [
                {"what": "idle", "wanted": "< 2%", "found": "1.5%", "verdict": "met"},
                {"what": "ahead", "wanted": "> 1", "found": "", "verdict": "not measured"},
            ]
        },
    }
    return {kind: {"benchmark": kind, **data, **HERE} for kind, data in made.items()}


def _fleet(speed: float) -> dict[str, Any]:
    each = {"p50": 1 / speed, "p99": 3 / speed}
    latencies = {name: each for name in ("first_token_s", "latency_s", "gap_s")}
    return {"output_tokens_per_s": 10 * speed, **latencies}


@functools.cache
def _committed() -> dict[str, dict[str, Any]]:
    """Return the first committed result of each kind."""
    return {each.kind: each.data for each in reversed(load(ROOT / RESULTS))}


def write_checkout(root: Path, kinds: Sequence[str]) -> Path:
    """Write a folder with pages, markers and one result of each of these kinds."""
    for page in (README, *PAGES):
        path = root / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "# Before\n\n<!-- results:begin -->\nreplaced\n<!-- results:end -->\n\nAfter\n",
            encoding="utf-8",
        )
    folder = root / RESULTS
    folder.mkdir(parents=True)
    made = results()
    for kind in kinds:
        text = json.dumps(made.get(kind) or _committed()[kind])
        (folder / f"{kind}_made_up.json").write_text(text, encoding="utf-8")
    return root
