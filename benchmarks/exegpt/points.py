"""A scenario under one latency bound: the best schedule, beside the best of every baseline."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any, final

from benchmarks.exegpt.discrete import play
from benchmarks.exegpt.iteration_level import IterationLevel
from benchmarks.exegpt.served import Served
from benchmarks.exegpt.static_batching import StaticBatches, hybrid_batches
from jaxserve.core.errors import DeviceMemoryError, InfeasibleBoundError
from jaxserve.planning.schedules import (
    Choice,
    Deployment,
    LatencyBounds,
    Policy,
    RRATimeline,
    TaskLengths,
    Timeline,
    search,
    timelines_of,
)
from jaxserve.planning.schedules.candidate import throughput_under
from jaxserve.planning.schedules.search import maximise, search_among

BASELINES = ("fastertransformer", "deepspeed", "orca", "vllm")
FAMILIES = ("rra", "waa", "continuous")


@final
class Contest:
    """ExeGPT and the baselines on one deployment and task.

    Attributes:
      static: FasterTransformer, whose latencies give the bounds.
      served: what each of `BASELINES` does.
      timelines: of RRA and WAA, ExeGPT's own schedules.
    """

    def __init__(self, deployment: Deployment, lengths: TaskLengths):
        self._deployment, self._lengths = deployment, lengths
        self.static = StaticBatches.of(deployment, lengths)
        level = IterationLevel(deployment, lengths)
        self.served: dict[str, Served] = {
            "fastertransformer": self.static.served,
            "deepspeed": hybrid_batches(deployment, lengths),
            "orca": level.orca(),
            "vllm": level.vllm(),
        }
        self.timelines = timelines_of(deployment, lengths, ("rra", "waa"))
        self._continuous = timelines_of(deployment, lengths, ("continuous",))

    @cached_property
    def _overlapping(self) -> Timeline:
        return RRATimeline(replace(self._deployment, overlaps_rounds=True), self._lengths)

    def point(self, bound_s: float, *, num_seeds: int = 0) -> dict[str, Any]:
        """Return the best of each system under a bound, and what the schedule did when played.

        `per_s` is that of the plan, the best of all families, and `exegpt_per_s` the better of RRA
        and WAA. With a bound, the plan is played `num_seeds` times, and so is the best schedule of
        RRA and WAA where the plan is another. A throughput is None where nothing keeps the bound
        ("NS" in the paper's figures).
        """
        bounds = LatencyBounds(latency_s=bound_s)
        score = throughput_under(bounds)
        per_s = {name: served.best(bound_s) or None for name, served in self.served.items()}
        for timeline in self.timelines:
            name = "rra" if isinstance(timeline, RRATimeline) else "waa"
            per_s[name] = maximise([timeline], score).score or None
        per_s["continuous"] = maximise(self._continuous, score).score or None
        point = {
            "bound_s": None if math.isinf(bound_s) else bound_s,
            "per_s_of": per_s,
            "batch_of": {name: _batch(served, bound_s) for name, served in self.served.items()},
            "overlapping_rra_per_s": maximise([self._overlapping], score).score or None,
        }
        try:
            choice = search(self._deployment, self._lengths, bounds)
        except InfeasibleBoundError as error:
            return point | {
                "per_s": None,
                "exegpt_per_s": None,
                "gain": None,
                "lowest_s": error.lowest["latency_s"],
            }
        throughput = float(choice.estimates.throughput)
        own = max(per_s["rra"] or 0.0, per_s.get("waa") or 0.0) or None
        return point | {
            "per_s": throughput,
            "exegpt_per_s": own,
            "gain": throughput / (per_s["fastertransformer"] or math.nan),
            **described(choice),
            "played": [
                self._played(each, bound_s, seed)
                for each in self._to_play(choice, bounds)
                for seed in range(num_seeds if math.isfinite(bound_s) else 0)
            ],
        }

    def _to_play(self, choice: Choice, bounds: LatencyBounds) -> list[Choice]:
        """Return the plan, and the best schedule of RRA and WAA if it is another."""
        if choice.schedule.layout.policy is not Policy.CONTINUOUS:
            return [choice]
        try:
            return [choice, search_among(self.timelines, bounds)]
        except (InfeasibleBoundError, DeviceMemoryError):
            return [choice]

    def _played(self, choice: Choice, bound_s: float, seed: int) -> dict[str, Any]:
        """Play a schedule with the real scheduler; see `Played`."""
        throughput = float(choice.estimates.throughput)
        longest = self._lengths.outputs.percentile(self._lengths.level)
        played = play(self._deployment, self._lengths, choice.schedule, per_s=throughput, seed=seed)
        is_long = played.num_tokens > longest
        p99_s = played.of_length(longest)
        return {
            "policy": choice.schedule.layout.policy.value,
            "seed": seed,
            "expected_per_s": throughput,
            "num_answers": len(played.latency_s),
            "per_s": played.throughput,
            "p99_length_s": None if math.isnan(p99_s) else p99_s,
            "within": played.within(bound_s),
            "longer_share": float(is_long.mean()),
            "missed_by_others": float((played.latency_s > bound_s)[~is_long].mean()),
            "num_preemptions": played.num_preemptions,
        }


def described(choice: Choice) -> dict[str, Any]:
    """Return a schedule, what it is expected to do, and what it took to find it."""
    schedule, estimates = choice.schedule, choice.estimates
    return {
        "latency_s": float(estimates.latency_s),
        "policy": schedule.layout.policy.value,
        "degree": schedule.layout.degree,
        "num_sharded_devices": schedule.layout.num_sharded_devices,
        "encode_batch": schedule.encode_batch,
        "max_running": schedule.max_running,
        "chunk_tokens": schedule.chunk_tokens,
        "num_decodes": schedule.num_decodes,
        "num_micro_batches": schedule.num_micro_batches,
        "num_encode_devices": schedule.num_encode_devices,
        "decode_batch": schedule.decode_batch,
        "memory_gb": float(estimates.memory_bytes) / 1e9,
        "search_s": choice.elapsed_s,
        "evaluated_share": choice.num_evaluated / choice.num_points,
    }


def _batch(served: Served, bound_s: float) -> int | None:
    index = served.best_at(bound_s)
    return None if index is None else int(served.batch[index])
