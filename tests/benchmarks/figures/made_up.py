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


def _start(seconds: float) -> Figures:
    """Return one start whose first token takes this long."""
    parts = ("interpreter", "imports", "tokenizer", "weights", "cache", "ready", "first_answer")
    return {
        **{f"{part}_s": seconds / 10 for part in (*parts, "second_answer")},
        **{"first_token_s": seconds, "resident_bytes": 8e8},
        **{"num_loaded": 3, "num_compiled": 4},
    }


def results() -> dict[str, dict[str, Any]]:
    """Return small results by kind; those of other kinds are in benchmarks/results."""
    speeds = {policy: 1.0 + 2 * i for i, policy in enumerate(POLICIES)}
    requests = [
        {"num_output_tokens": 8, "arrival_s": i, "first_token_s": i + 1.0, "finished_s": i + 5.0}
        for i in range(4)
    ]
    flover = {
        "alone_s": 2.0,
        "interval_s": 0.2,
        "constant": [
            {**_figures(speed / n), "policy": policy, "num_requests": n, "requests": requests}
            for n in (1, 2, 4)
            for policy, speed in speeds.items()
        ],
        "poisson": [
            {**_figures(speed * 4 / ms), "policy": policy, "mean_interval_s": ms / 50}
            for ms in (1, 10)
            for policy, speed in speeds.items()
        ],
        "uniform": [
            {**_figures(speed * 8 / b), "policy": policy, "longest": b}
            for b in (8, 16)
            for policy, speed in {**speeds, "flover_without_shuffle": 7.0}.items()
        ],
        "windows": [{**_figures(2.0), "policy": "window_2000ms", "requests": requests}],
    }
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
    found = {
        "num_prefix_queried": 100,
        "num_prefix_hit": 50,
        "num_prefix_hit_on_host": 10,
        "num_evicted_tokens": 7,
    }
    talks = {
        policy: {
            "points": [{**point, "engine": found} for point in curve["points"]],
            "requests_per_s_at_bound": None if policy == "auto" else 1.5,
            "of_stateless": None if policy == "auto" else 1.2,
        }
        for policy, curve in points.items()
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
    simulated = [
        {
            "policy": policy,
            **summary(
                [
                    {
                        "measured": _figures(speed),
                        "predicted": _figures(speed * (1 + error)),
                        "error": {"output_tokens_per_s": error, "latency_p99_s": -error},
                    }
                    for error in (0.1, 0.02, 0.03)
                ]
            ),
        }
        for policy, speed in speeds.items()
    ]
    s3 = {"output_tokens_per_s": 5.0, "average_batch": 4.0, "num_iterations": 3}
    faster = {"output_tokens_per_s": 8.0}
    made = {
        "offline": offline,
        "http": _http(),
        "policies": {"repeats": 3, "policies": policies, "arguments": ARGUMENTS},
        "online": {"repeats": 1, "policies": points, "arguments": ARGUMENTS},
        "conversations": {
            "repeats": 1,
            "sets": [
                {"min_rounds": rounds, "reaction_s": 5.0, "policies": talks} for rounds in (1, 5)
            ],
            "arguments": {
                **ARGUMENTS,
                **{"num_conversations": 3, "simulated": False, "bound": 0.1, "rates": "0.5,1"},
            },
        },
        "flover": {"repeats": 1, **flover, "arguments": ARGUMENTS},
        "simulate": {"repeats": 3, "policies": simulated},
        "s3": {
            "arguments": ARGUMENTS,
            "models": {"a model": {"orca": s3, "auto": s3, "s3_oracle": {**s3, **faster}}},
            "paper": {"a model": {"average_batch": [1.0, 2.0, 3.0]}},
            "slo": {"a model": {"orca": [{"requests_within_per_s": 0.5}]}},
        },
        "startup": {
            **{"repeats": 3, "model": "a-model", "settings": {}},
            **{
                kind: {**summary([_start(speed * n) for n in (1, 2, 3)]), "executables": []}
                for kind, speed in (("cold", 10.0), ("filling", 9.0), ("warm", 1.0))
            },
        },
        "compile_times": {
            "repeats": 1,
            "arguments": {
                **{"target": "h100", "shape": "8b", "layout": "unrolled"},
                **{"max_slots": 256, "max_step_tokens": 2048},
            },
            **{
                way: {"wall_s": wall_s, "sum_s": 3.0, "executables": {"one": 1.0, "two": 2.0}}
                for way, wall_s in (("serial", 3.1), ("parallel", 1.6))
            },
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
        "cells_host": {
            "repeats": 2,
            "arguments": ARGUMENTS,
            "points": [
                {
                    "application": "lstm",
                    **summary(
                        [
                            {
                                **{"nodes_per_s": 2000.0 * speed, "requests_per_s": 20.0 * speed},
                                "scheduled_per_s": 9000.0 * speed,
                            }
                            for speed in (1, 2)
                        ]
                    ),
                }
            ],
        },
        "adapters": {
            **{"repeats": 2, "arguments": ARGUMENTS | {"rank": 16}, "load_s": 0.25},
            "without": summary([{"tokens_per_s": 100.0}, {"tokens_per_s": 120.0}]),
            "cases": [
                {
                    "num_adapters": num,
                    "share_of_throughput": {"median": share, "range": [share - 0.05, 0.85]},
                    **summary([{"tokens_per_s": 80.0}, {"tokens_per_s": 90.0}]),
                }
                for num, share in ((8, 0.8), (64, 0.7))
            ],
        },
        "speculation": {
            **{"repeats": 2, "arguments": ARGUMENTS | {"output_tokens": 64}},
            "cases": [
                {
                    **{"kind": kind, "num_requests": 4},
                    "is_faster_by": {"lookup": {"median": gain, "range": [gain - 0.1, gain]}},
                    "without": summary([{"tokens_per_s": 50.0}] * 2),
                    "lookup": summary([{"tokens_per_s": 50.0 * gain, "accepted_share": 0.7}] * 2),
                }
                for kind, gain in (("chat", 0.93), ("editing", 3.4))
            ],
            "peers": {
                "editing": {
                    "engines": {
                        engine: {
                            "error": None,
                            **summary(
                                [
                                    {
                                        **{"jaxserve_is_faster_by": 2 / rate, "startup_s": 1.0},
                                        "output_tokens_per_s": 10.0 * rate,
                                    }
                                ]
                                * 2
                            ),
                        }
                        for engine, rate in (("jaxserve", 2), ("vllm", 4))
                    },
                    "fewer": {},
                }
            },
        },
        "gpu_check": {
            "bars": [
                {"what": "idle", "wanted": "< 2%", "found": "1.5%", "verdict": "met"},
                {"what": "ahead", "wanted": "> 1", "found": "", "verdict": "not measured"},
            ]
        },
    }
    made |= {"exegpt": _exegpt(), "exegpt_bounds": _exegpt_bounds(), "cells": _cells()}
    made |= {"exegpt_drift": _exegpt_drift()}
    return {kind: {"benchmark": kind, **data, **HERE} for kind, data in made.items()}


def _http() -> dict[str, Any]:
    """Return figures of three ways, and of a server that did not start."""
    latency = {"p50": 0.2, "p99": 0.3}
    figures = {
        "at_once": {"tokens_per_s": 123.0},
        "poisson": {"first_token_s": latency, "token_s": latency, "share_of_own_rate": 0.7},
    }
    ways = {"in process": figures, "http": figures, "a peer": _sooner(figures)}
    costs = {"throughput_share": 0.96, "first_token_later_s": 0.001, "outside_engine_s": 0.002}
    point = {
        "connections": 4,
        "ways": {way: summary([each, each]) for way, each in ways.items()},
        "costs": summary([costs, costs]),
        "costs_beside_socket": summary([costs, costs]),
    }
    return {
        **{"repeats": 2, "points": [point], "arguments": ARGUMENTS},
        "failed": {"lost": "no wheel for it"},
    }


def _sooner(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a peer whose first token is sooner, in the median."""
    poisson = figures["poisson"] | {"first_token_s": {"p50": 0.1, "p99": 0.3}}
    return figures | {"poisson": poisson}


def _fleet(speed: float) -> dict[str, Any]:
    each = {"p50": 1 / speed, "p99": 3 / speed}
    latencies = {name: each for name in ("first_token_s", "latency_s", "gap_s")}
    return {"output_tokens_per_s": 10 * speed, **latencies}


def _exegpt() -> dict[str, Any]:
    """Return figures of one scenario: WAA keeps no bound, vLLM is a fifth ahead of the plan."""
    point = {
        **{"figure": 6, "model": "a model", "cluster": "A40", "num_devices": 4, "task": "S"},
        **{"bound_s": 2.0, "per_s": 10.0, "gain": 2.5, "latency_s": 1.9, "policy": "rra"},
        **{"encode_batch": 5, "num_decodes": 7, "num_micro_batches": 1, "exegpt_per_s": 10.0},
        **{"num_sharded_devices": 4, "degree": 2},
        "per_s_of": {
            **{"fastertransformer": 4.0, "deepspeed": 4.0, "orca": 8.0, "vllm": 12.0},
            **{"rra": 10.0, "waa": None, "continuous": 9.0},
        },
        "played": [{"policy": "rra", "within": 0.995}],
    }
    unmet = {key: point[key] for key in ("model", "cluster", "num_devices", "task", "per_s_of")}
    unmet |= {"figure": 8, "bound_s": None, "per_s": None, "gain": None, "lowest_s": 9.0}
    check = {
        **{"batch": 3, "per_s": 7.5, "estimated_per_s": 8.0, "p99_length_s": 1.5},
        **{"estimated_latency_s": 1.6, "within": 0.99},
    }
    return {
        "points": [point, unmet],
        "figure_7": [point | {"checked": {"orca": check, "vllm": None}}],
        "figure_10": [
            {
                **{"data_set": "WMT", "model": "a model", "bound_s": None, "gain": 4.0},
                **{"static_per_s": 2.0, "rra_per_s": 8.0, "rra_latency_s": 3.0},
                **{"waa_per_s": None, "waa_latency_s": None},
            }
        ],
        "figure_11": [
            {
                **{"policy": "waa", "bound_s": 2.0, "changed": "mean", "by": by},
                **{"left_alone_per_s": 8.0, "planned_per_s": per_s, "left_alone_latency_s": p99_s},
                "left_alone_same_length_s": 1.5,
            }
            for by, per_s, p99_s in ((0.7, 9.0, 1.0), (1.0, 8.0, 1.0), (1.15, None, 1.2))
        ],
        "table_5": [
            {
                **{"task": "S", "tolerance": 0.02, "policy": "rra", "variable": "B_E"},
                **{"latency": 0.5, "throughput": 2.0, "paper": [0.6, 2.3]},
            }
        ],
        "table_6": [
            {
                **{"policy": "waa", "encode_batch": 4, "num_decodes": 1, "degree": 2},
                **{"latency_s": 2.5, "paper_latency_s": 3.0, "per_s": 20.0, "paper_per_s": 22.0},
            }
        ],
        "mean_gain": {"small": 2.5, "large": None, "all": 2.5},
        "mean_gain_exegpt": {"small": 2.5, "large": None, "all": 2.5},
        "mean_gain_exegpt_over": {
            **{"fastertransformer": 2.5, "deepspeed": 2.5, "orca": 1.25, "vllm": 0.83},
        },
        "mean_gain_overlapping": 2.75,
        "mean_gain_over": {"fastertransformer": 2.5, "deepspeed": 2.5, "orca": 1.25, "vllm": 0.83},
        "paper_mean_gain": {"small": 2.0, "large": 3.2, "all": 2.9},
        "played": {
            **{"num_runs": 1, "num_answers": 1000, "longer_share": 0.01},
            "num_runs_of": {"rra": 1},
            "within": {"mean": 0.995, "least": 0.995},
            "missed_by_others": {"mean": 0.001, "most": 0.001},
            "throughput_error": {"least": -0.02, "most": 0.03},
        },
        "search": {"most_s": 0.5, "most_evaluated_share": {"a model": 0.004}},
        "algorithm_1": {
            **{"missed_share": 0.25, "beyond_tolerance_share": 0.125},
            **{"num_cases": 8, "worst_share": 0.5},
        },
    }


def _exegpt_bounds() -> dict[str, Any]:
    """Return a task under two bounds: the plan is ahead and late under one, and has none for the
    other.
    """
    best = {"batch": 4, "answers_per_s": 2.0}
    return {
        "arguments": {**ARGUMENTS, "scale": 0.25, "batches": "4,8"},
        "repeats": 1,
        "tasks": {
            "S": [
                {
                    **{"bound_s": 1.5, "best": {"orca": best, "auto": None}},
                    "exegpt": {"answers_per_s": 2.5, "p99_s": 1.6, "within": 0.98},
                },
                {"bound_s": None, "best": {"orca": best, "auto": None}, "exegpt": None},
            ]
        },
        "simulated": {
            "configurations": [{}] * 10,
            "answers_per_s": {"median": 0.02, "most": 0.05},
            "p99_s": {"median": 0.03, "most": 0.09},
        },
    }


def _exegpt_drift() -> dict[str, Any]:
    """Return one change, after which the schedule that was left alone misses its bound."""

    def engine(speed: float, share: float) -> dict[str, Any]:
        figures = {"answers_per_s": speed, "share_in_bound": share, "p99_s": 2.0}
        return {"from_drift": figures, "settled": {**figures, "answers_per_s": speed + 1}}

    adapted = {**engine(4.5, 0.975), "adopted": [{"encode_batch": 3}, {"encode_batch": 2}]}
    row = {"changed": "mean", "to": 1.3, "left_alone": engine(5.0, 0.9), "adapted": adapted}
    return {
        **{"arguments": {**ARGUMENTS, "after": 200, "seed": 0}, "bound_s": 11.02},
        "drifts": [{**row, "planned_anew": engine(6.0, 0.99)}],
    }


def _cells() -> dict[str, Any]:
    """Return one sweep of two policies, and a system that failed beside one that ran."""
    about = {"application": "lstm", "how": "simulated, thesis"}
    parts = ("latency_s", "queueing_s", "computing_s")
    points = [
        {
            **{**about, "policy": policy, "rate": rate, "requests_per_s": rate or 4.0},
            **{part: {"p50": 0.001, "p90": (rate or 9.0) * slower / 1e3} for part in parts},
            "average_batch": 3.0,
            "quantiles": {part: [0.0, 0.001, 0.004] for part in parts[1:]},
        }
        for rate in (None, 1.0, 2.0, 4.0)
        for policy, slower in (("batchmaker", 1.0), ("padding_10", 2.0))
    ]
    own = {"requests_per_s": 5.0, "latency_s": {"p50": 0.1, "p90": 0.2}, "agreeing": 1.0}
    load = {"application": "lstm", "load": "all at once"}
    return {
        **{"repeats": 1, "arguments": {"lengths": "wmt15"}, "sizes": {"hidden_size": 8}},
        "points": points,
        "compared": [
            {
                **about,
                "peaks_per_s": {"batchmaker": 4.0, "padding_10": 5.0},
                "peak_over": {"padding_10": 0.8},
                "best": "padding_10",
                "peaks_within_per_s": {"batchmaker": 4.0, "padding_10": 0.0},
                "within_over": {"padding_10": None},
                "best_within": "padding_10",
                "p90_lower_by": {"padding_10": 0.5},
            }
        ],
        "compare": [
            {**load, "engine": "jaxserve", "error": None, **summary([own])},
            {**load, "engine": "lost", "error": "no wheel\nfor it", "runs": []},
        ],
    }


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
