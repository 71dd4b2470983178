"""A schedule played by the real scheduler on a simulated clock, with sampled lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from benchmarks.common.counters import spent_s
from benchmarks.exegpt.baselines import Served, whole_layout
from benchmarks.exegpt.step_cost import (
    LayerStepCost,
    MixedStepCost,
    pipeline_of,
)
from jaxserve.core.config import EngineConfig
from jaxserve.execution.step_cost import StepCost
from jaxserve.planning import GroupCosts, simulate
from jaxserve.planning.schedules import (
    AllocationPolicy,
    Deployment,
    LengthDistribution,
    Schedule,
    TaskLengths,
)
from jaxserve.planning.schedules.layer_cost import Pipeline
from jaxserve.planning.schedules.plan import iteration_of
from jaxserve.scheduling.admission import MaxLength, OnDemand
from jaxserve.scheduling.iteration.continuous import Unified
from jaxserve.scheduling.iteration.rra import RRA
from jaxserve.scheduling.iteration.waa import DECODE, ENCODE, WAA
from jaxserve.scheduling.order import FCFS
from jaxserve.scheduling.policy import IterationShape
from jaxserve.scheduling.policy import Policy as ServingPolicy
from jaxserve.scheduling.retention import Stateless
from jaxserve.workload import WorkloadItem

_PAGE_TOKENS = 16
# Minimum and maximum of counted answers. With a target of 99 %, the share of 1,000 answers has a
# standard deviation of 0.3 points.
_LEAST, _MOST = 1000, 2000


@final
@dataclass(frozen=True, kw_only=True)
class Played:
    """The figures of a schedule between filling its batch and emptying it.

    Attributes:
      throughput: answers per second.
      latency_s: seconds from admission to end, of every counted answer.
    """

    throughput: float
    latency_s: np.ndarray
    num_tokens: np.ndarray
    num_preemptions: int

    def within(self, bound_s: float) -> float:
        """Return the share of the answers that keep a bound."""
        return float((self.latency_s <= bound_s).mean())

    def of_length(self, num_tokens: int) -> float:
        """Return the mean seconds of answers within 5 % of a length; NaN without any."""
        near = np.abs(self.num_tokens - num_tokens) <= 0.05 * num_tokens
        return float(self.latency_s[near].mean()) if near.any() else float("nan")


def policy_of(iteration: IterationShape, *, reserves_longest: bool = False) -> ServingPolicy:
    """Return a policy without retention, in the order of arrival."""
    admission = MaxLength() if reserves_longest else OnDemand()
    return ServingPolicy("played", admission, FCFS(), iteration, Stateless())


def play(
    deployment: Deployment, lengths: TaskLengths, schedule: Schedule, *, per_s: float, seed: int
) -> Played:
    """Play a schedule with sampled lengths, and more requests than it serves.

    An encoder-decoder model's answers have one more token, see `LayerStepCost`. The page pool is
    the memory of the fullest device without the weights. Stages of an encode group after its first
    add to each answer's time, which the group's timeline does not have.

    Args:
      per_s: the expected throughput; a quarter more requests arrive.
    """
    if schedule.layout.policy is AllocationPolicy.CONTINUOUS:
        pipeline = pipeline_of(deployment, schedule.layout)
        return played_policy(
            policy_of(iteration_of(schedule)),
            MixedStepCost(deployment, pipeline),
            deployment,
            lengths,
            num_slots=schedule.max_running,
            num_filling=2 * schedule.max_running,
            per_s=per_s,
            seed=seed,
            num_pages=_num_pages(deployment, pipeline),
            max_decode_iterations=1,
            num_extra=0,
        )
    cost, num_pages, drain_s, before_s = _cost(deployment, lengths, schedule)
    return played_policy(
        policy_of(_shape(schedule, per_s * before_s)),
        cost,
        deployment,
        lengths,
        num_slots=int(1.25 * (schedule.decode_batch + 3 * schedule.encode_batch)) + 2,
        num_filling=int(schedule.decode_batch) + 2 * schedule.encode_batch,
        per_s=per_s,
        seed=seed,
        num_pages=num_pages,
        max_step_tokens=(schedule.encode_batch + 2) * 2 * lengths.inputs.max_length,
        drain_s=drain_s,
    )


def played_policy(
    policy: ServingPolicy,
    cost: StepCost,
    deployment: Deployment,
    lengths: TaskLengths,
    *,
    num_slots: int,
    num_filling: int,
    per_s: float,
    seed: int,
    num_pages: int | None = None,
    max_step_tokens: int = 1 << 14,
    drain_s: float = 0.0,
    max_decode_iterations: int = 64,
    num_extra: int | None = None,
) -> Played:
    """Play a policy with sampled lengths, and more requests than it serves.

    Args:
      num_filling: answers that are not counted at the beginning, nor at the end.
      num_pages: of the pool; None for as many as all slots may need.
      drain_s: seconds that are added to each answer.
      num_extra: tokens that are added to each answer; by default one for a model with an encoder,
        see `LayerStepCost`.
      max_decode_iterations: of a step; 1 for iteration-level scheduling.
    """
    if num_extra is None:
        num_extra = 0 if deployment.model.is_decoder_only else 1
    num_counted = int(np.clip(2 * num_filling, _LEAST, _MOST))
    num = num_counted + 2 * num_filling
    items = _sampled(lengths, num, seed, num_extra, num_at_once=2 * num_filling, per_s=per_s)
    longest = lengths.inputs.max_length + lengths.outputs.max_length + num_extra
    most_pages = num_slots * (longest // _PAGE_TOKENS + 2)
    simulation = simulate(
        items,
        policy,
        EngineConfig(
            page_size=_PAGE_TOKENS,
            num_pages=max(min(num_pages or most_pages, most_pages), longest // _PAGE_TOKENS + 2),
            max_slots=num_slots,
            max_context=longest + 1,
            max_step_tokens=max_step_tokens + num_slots,
            max_decode_iterations=max_decode_iterations,
        ),
        cost,
        progress=False,
    )
    timings = [completion.timing for completion in simulation.completions]
    ended = np.array([timing.finished_s or 0.0 for timing in timings])
    counted = slice(num_filling, num_filling + num_counted)
    ends = np.sort(ended)[counted]
    return Played(
        throughput=(len(ends) - 1) / (ends[-1] - ends[0]),
        latency_s=spent_s(simulation.completions)[counted] + drain_s,
        num_tokens=np.array([i.num_output_tokens or 0 for i in items])[counted] - num_extra,
        num_preemptions=sum(timing.num_preemptions for timing in timings),
    )


def _sampled(
    lengths: TaskLengths, num: int, seed: int, num_extra: int, *, num_at_once: int, per_s: float
) -> list[WorkloadItem]:
    """Return requests of independently drawn lengths of at least one token.

    Args:
      num_extra: tokens that are added to each answer.
      num_at_once: requests that wait at the beginning.
      per_s: later ones arrive at 1.25 times this rate.
    """
    rng = np.random.default_rng(seed)

    def draw(of: LengthDistribution) -> Sequence[int]:
        drawn = rng.choice(of.max_length + 1, num, p=of.probabilities)
        return np.maximum(drawn, 1).tolist()

    longest = lengths.outputs.max_length + num_extra
    prompts, answers = draw(lengths.inputs), draw(lengths.outputs)
    return [
        WorkloadItem(
            prompt_token_ids=(1,) * prompt,
            num_output_tokens=answer + num_extra,
            max_tokens=longest,
            arrival_s=max(0, i - num_at_once) / (1.25 * per_s),
        )
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def _shape(schedule: Schedule, num_before: float) -> IterationShape:
    """Return the iteration shape of a schedule.

    `num_before` sequences are encoded or handed over by WAA at a time.
    """
    batch, tokens = schedule.encode_batch, schedule.encode_tokens
    if schedule.layout.policy is AllocationPolicy.RRA:
        return RRA(
            encode_batch=batch,
            decode_iterations=schedule.num_decodes,
            encode_tokens=tokens,
            decode_batch=schedule.decode_batch,
        )
    decode_batch = schedule.decode_batch + num_before
    return WAA(encode_batch=batch, encode_tokens=tokens, decode_batch=decode_batch)


def _cost(
    deployment: Deployment, lengths: TaskLengths, schedule: Schedule
) -> tuple[StepCost, int, float, float]:
    """Return step costs, pages of the pool, and seconds of an answer outside the decode group.

    The seconds are those added to each answer, and those before its handover ends: two encode
    batches are in flight.
    """
    if schedule.layout.policy is AllocationPolicy.RRA:
        cost = LayerStepCost.of_layout(deployment, schedule.layout)
        return cost, _num_pages(deployment, cost.pipeline), 0.0, 0.0
    encode, decode = groups_of(deployment, schedule)
    num_micro = schedule.num_micro_batches
    num_turns = num_micro * -(-int(decode.num_stages[0]) // num_micro)
    num_links = min(int(encode.num_devices[0]), int(decode.num_devices[0]))
    # Pages are copied at the speed at which the estimates hand tokens over.
    page_s = float(deployment.cost.handover_s(float(_PAGE_TOKENS), num_links))
    groups = {
        ENCODE: LayerStepCost(deployment, encode, decodes=False),
        DECODE: LayerStepCost(deployment, decode, num_turns=num_turns, encodes=False),
    }
    batch, tokens = np.array([schedule.encode_batch]), np.array([schedule.encode_tokens])
    length = np.sqrt(lengths.inputs.mean_square)
    slowest_s, through_s = encode.encode_pass_s(deployment, batch, length, tokens, joins=False)
    both = tuple(groups[number] for number in sorted(groups))
    cost = GroupCosts(both, page_bytes=1.0, link_bytes_per_s=1.0 / page_s)
    before_s = 2 * float(slowest_s[0]) + page_s * schedule.encode_tokens / _PAGE_TOKENS
    num_pages = _num_pages(deployment, decode, holds_encoder=False)
    return cost, num_pages, float(through_s[0] - slowest_s[0]), before_s


def groups_of(deployment: Deployment, schedule: Schedule) -> tuple[Pipeline, Pipeline]:
    """Return the pipelines of WAA's encode and decode group."""
    cluster, layout = deployment.cluster, schedule.layout
    num_encode = schedule.num_encode_devices
    single = cluster.num_devices - layout.num_sharded_devices
    num_sharded = max(0, num_encode - single)

    def pipeline(num: int, sharded: int, first: int) -> Pipeline:
        return Pipeline.of(
            np.array([num]),
            np.array([sharded]),
            np.array([layout.degree]),
            first_device=first,
            devices_per_machine=cluster.devices_per_machine,
        )

    return pipeline(num_encode, num_sharded, 0), pipeline(
        cluster.num_devices - num_encode, layout.num_sharded_devices - num_sharded, num_encode
    )


def _num_pages(deployment: Deployment, pipeline: Pipeline, *, holds_encoder: bool = True) -> int:
    weights, one = (
        float(pipeline.whole_bytes(deployment.model, tokens, holds_encoder=holds_encoder)[0])
        for tokens in (0.0, 1.0)
    )
    free = deployment.cluster.memory_bytes - weights
    return max(2, int(free / ((one - weights) * _PAGE_TOKENS)))


def compared(
    name: str, served: Served, bound_s: float, deployment: Deployment, lengths: TaskLengths
) -> dict[str, Any] | None:
    """Return the estimate of `orca`'s or `vllm`'s best under a bound, and its figures when played.

    Without a bound, batches are too large to play in seconds, and None is returned.
    """
    index = served.best_at(bound_s)
    if index is None or math.isinf(bound_s):
        return None
    is_orca, batch = name == "orca", int(served.batch[index])
    chunk = 0 if is_orca else int(np.broadcast_to(served.tokens, served.batch.shape)[index])
    played = played_policy(
        policy_of(Unified(chunk_tokens=chunk), reserves_longest=is_orca),
        MixedStepCost(deployment, pipeline_of(deployment, whole_layout(deployment))),
        deployment,
        lengths,
        num_slots=batch,
        num_filling=2 * batch,
        per_s=float(served.throughput[index]),
        seed=0,
        max_decode_iterations=1,
    )
    return {
        "batch": batch,
        "estimated_per_s": float(served.throughput[index]),
        "per_s": played.throughput,
        "estimated_latency_s": float(served.latency_s[index]),
        "p99_length_s": or_none(played.of_length(lengths.outputs.percentile(lengths.level))),
        "within": played.within(bound_s),
        "num_preemptions": played.num_preemptions,
    }


def or_none(number: float) -> float | None:
    """Return a number that JSON has, and None for others."""
    return number if math.isfinite(number) else None
