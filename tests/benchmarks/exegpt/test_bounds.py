"""Plans beside hand-tuned batch sizes: their arithmetic by hand, and a run on a tiny model."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from benchmarks.exegpt.bounds import best_under, bounds_of, figures_of, main, missed_of
from jaxserve.core.request import Completion, Sample, Timing
from tests.models.gguf_models import TOKENIZER, write_gguf

pytestmark = pytest.mark.release


def _run(policy: str, batch: int, answers_per_s: float, p99_s: float) -> dict[str, object]:
    return {"policy": policy, "batch": batch, "answers_per_s": answers_per_s, "p99_s": p99_s}


def test_the_best_batch_of_a_policy_by_hand():
    """Medians of a batch size keep the bound or not; the largest of 4 misses, so 2 counts."""
    runs = [
        *(_run("orca", 1, per_s, 1.0) for per_s in (1.0, 1.2, 1.1)),
        *(_run("orca", 2, per_s, p99) for per_s, p99 in ((2.0, 2.4), (2.2, 1.9), (9.0, 1.8))),
        _run("orca", 4, 4.0, 2.5),
        _run("auto", 2, 8.0, 0.5),
    ]
    best = best_under(runs, "orca", 2.0)
    assert best == {
        "batch": 2,
        "answers_per_s": 2.2,
        "range": [2.0, 9.0],
        "p99_s": 1.9,
        "num_runs": 3,
    }
    unbound = best_under(runs, "orca", math.inf)
    assert unbound is not None and unbound["batch"] == 4
    assert best_under(runs, "orca", 0.9) is None


def test_bounds_and_latencies_by_hand():
    """Percentiles of 0 ... 10 s; latencies count from admission, and rates over the whole run."""
    assert bounds_of(np.arange(11.0).tolist()) == pytest.approx([1.0, 3.0, 7.0, math.inf])
    done = [
        Completion(
            request_id=str(i),
            prompt_token_ids=(1,),
            samples=(Sample(text="", token_ids=(1, 2, 3), finish_reason="length"),),
            timing=Timing(arrival_s=0.0, admitted_s=1.0, first_token_s=2.0, finished_s=3.0 + i),
        )
        for i in range(2)
    ]
    figures = figures_of(done, 4.0)
    assert figures["answers_per_s"] == 0.5 and figures["tokens_per_s"] == 1.5
    assert figures["latencies_s"] == [2.0, 3.0]
    assert figures["p99_s"] == pytest.approx(2.99)
    assert missed_of(done, 2.5, 3) == {"longer_share": 0.0, "missed_share": 0.5}
    assert missed_of(done, 2.5, 2) == {"longer_share": 1.0, "missed_share": 0.0}


def test_every_policy_batch_and_plan_is_run(capsys, tmp_path):
    """A tiny model, one task, one batch size: static batches, ORCA, and a plan for each bound."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", tokenizer=TOKENIZER)
    arguments = [
        *("--model", str(path), "--tasks", "S", "--scale", "0.03", "--num-requests", "6"),
        *("--policies", "orca", "--batches", "2", "--repeats", "1", "--kv-memory", "2MB"),
        *("--max-context", "512", "--known", "50"),
    ]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["is_whole"] and result["benchmark"] == "exegpt_bounds"
    runs = result["runs"]
    assert {(r["policy"], r["batch"]) for r in runs if r["policy"] != "exegpt"} == {
        (policy, 2) for policy in ("fastertransformer", "orca")
    }
    assert sum(run["policy"] == "exegpt" for run in runs) == 4
    planned = [run for run in runs if run["policy"] == "exegpt" and "failed" not in run]
    assert {run["family"] for run in planned} <= {"rra", "continuous"}
    points = result["tasks"]["S"]
    assert len(points) == 4 and points[3]["bound_s"] is None
    assert points[3]["exegpt"]["within"] == 1.0 and points[3]["exegpt"]["missed_share"] == 0.0
    for point in points:
        for policy, best in point["best"].items():
            own = [r for r in runs if r["policy"] == policy and r["task"] == "S"]
            kept = [r for r in own if r["p99_s"] <= (point["bound_s"] or math.inf)]
            most = max((r["answers_per_s"] for r in kept), default=None)
            assert most == (best and best["answers_per_s"])
    played = [run for run in runs if "failed" not in run]
    assert len(result["simulated"]["configurations"]) == len(played)


def test_a_spent_budget_ends_after_a_whole_round(capsys, tmp_path):
    """Without time for a second round there is one, and the result says that it is not whole."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", tokenizer=TOKENIZER)
    arguments = [
        *("--model", str(path), "--tasks", "S", "--scale", "0.03", "--num-requests", "2"),
        *("--policies", "orca", "--batches", "2", "--repeats", "2", "--kv-memory", "2MB"),
        *("--max-context", "512", "--known", "20", "--no-simulation", "--budget-s", "0"),
    ]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert not result["is_whole"] and result["repeats"] == 1
    runs = result["runs"]
    assert len(runs) == 6 and {run["number"] for run in runs} == {0}
