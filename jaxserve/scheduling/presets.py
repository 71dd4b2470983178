"""Named policies."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.core.errors import InvalidConfigError, UnheededBoundError
from jaxserve.core.request import Request
from jaxserve.scheduling.admission import Expected, MaxLength, OnDemand, Oracle, Predicted
from jaxserve.scheduling.cache_ttl import HeldForTools, ProgramFirst
from jaxserve.scheduling.iteration.continuous import IterationLevel, Unified
from jaxserve.scheduling.iteration.request_level import Concurrent, Static
from jaxserve.scheduling.iteration.rra import RRA
from jaxserve.scheduling.iteration.waa import WAA
from jaxserve.scheduling.ltr import LearningToRank
from jaxserve.scheduling.mlfq import FeedbackQueues
from jaxserve.scheduling.order import (
    FCFS,
    DueFirst,
    LongestFirst,
    ShortestPredictedFirst,
    TailFirst,
)
from jaxserve.scheduling.past_future import PastFuture
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.preemption import LastInOrder, LongestRemaining
from jaxserve.scheduling.retention import DeviceOnly, Stateless, Tiered
from jaxserve.scheduling.seer import SiblingLengths
from jaxserve.scheduling.slos_serve import SoftAdmission, WithinBounds
from jaxserve.scheduling.tie import TailInflated
from jaxserve.scheduling.trail import LimitedPreemption
from jaxserve.scheduling.uniboost import Boosted, LatestBoosted
from jaxserve.scheduling.vtc import VirtualTokenCounter

PRESETS: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        # ORCA: iteration-level scheduling, memory reserved for the longest possible answer.
        Policy("orca", MaxLength(), FCFS(), IterationLevel(), Stateless()),
        # FasterTransformer: whatever waits when the device is free becomes a batch.
        Policy("fastertransformer", MaxLength(), FCFS(), Static(), Stateless()),
        # Triton's dynamic batching, with the window of the Flover paper's figure 1.
        Policy("triton_window", MaxLength(), FCFS(), Static(window_s=0.5), Stateless()),
        # FasterTransformer's concurrent instances.
        Policy("concurrent_instances", MaxLength(), FCFS(), Concurrent(), Stateless()),
        # Flover: requests are fused into the running batch the iteration after they arrive. Its
        # memory shuffle is the engine's slot compaction, which every policy has; so its choices
        # here are ORCA's.
        Policy("flover", MaxLength(), FCFS(), IterationLevel(), Stateless()),
        # vLLM: pages on demand, preemption by recomputation, chunked prefill together with decode.
        Policy("vllm_like", OnDemand(), FCFS(), Unified(), Stateless()),
        # As vllm_like, but it knows how long every answer will be, and never preempts.
        Policy("oracle", Oracle(), FCFS(), Unified(), Stateless()),
        # S3: memory reserved by predicted length and packed by decreasing first fit; a sequence
        # that
        # uses it up is swapped out, and returns with twice as much.
        Policy(
            "s3",
            Predicted(),
            LongestFirst(Predicted()),
            IterationLevel(),
            Stateless(),
            LastInOrder(keeps_state=True),
        ),
        # S3 with a predictor that is always right.
        Policy("s3_oracle", Oracle(), LongestFirst(Oracle()), IterationLevel(), Stateless()),
        # Pensieve: KV survives its request, on the device and then on the host; a tenth of the pool
        # is kept for answers to grow into.
        Policy(
            "pensieve", OnDemand(0.1), FCFS(), Unified(), Tiered(), LastInOrder(keeps_state=True)
        ),
        # Pensieve (GPU cache) of section 3.6.
        Policy("pensieve_device_only", OnDemand(0.1), FCFS(), Unified(), DeviceOnly()),
        # ExeGPT with round-robin allocation. Its runner extends FasterTransformer (section 3) and
        # has no paging (section 7.3), so it reserves the longest possible answer; and what is never
        # preempted keeps the latency that was planned. Without a planner's sizes, these fill 32
        # slots with answers of 128 tokens: B_D = B_E * ceil(128 / N_D). The paper's order is first
        # come, first served, as this one is while no request has a bound of its own.
        Policy(
            "exegpt_rra",
            MaxLength(),
            DueFirst(),
            RRA(encode_batch=4, decode_iterations=16),
            Stateless(),
            families=("rra",),
        ),
        # ExeGPT with workload-aware allocation. Plans of WAA-C and WAA-M share out the devices by
        # computing time and by memory; they schedule alike.
        *(
            Policy(
                f"exegpt_{family}",
                MaxLength(),
                DueFirst(),
                WAA(encode_batch=4),
                Stateless(),
                families=(family,),
            )
            for family in ("waa_c", "waa_m")
        ),
        # Others' orders and admissions, each beside vLLM's other choices (docs/policies.md).
        Policy("shortest_predicted", OnDemand(), ShortestPredictedFirst(), Unified(), Stateless()),
        Policy("tie", OnDemand(), TailInflated(), Unified(), Stateless()),
        Policy("uniboost", OnDemand(), Boosted(), Unified(), Stateless(), LatestBoosted()),
        Policy(
            "mlfq",
            OnDemand(),
            FeedbackQueues(),
            Unified(preempts=True),
            Stateless(),
            LastInOrder(keeps_state=True),
        ),
        Policy("vtc", OnDemand(), VirtualTokenCounter(), Unified(), Stateless()),
        Policy("past_future", PastFuture(), FCFS(), Unified(), Stateless()),
        *(
            Policy(
                name,
                OnDemand(),
                order,
                Unified(preempts=True),
                Stateless(),
                LastInOrder(keeps_state=True),
            )
            for name, order in (("ltr", LearningToRank()), ("trail", LimitedPreemption()))
        ),
        # Seer: the samples of a request are a group.
        Policy(
            "seer",
            OnDemand(),
            SiblingLengths(),
            Unified(),
            Stateless(),
            LastInOrder(keeps_state=True),
        ),
        # SLOs-Serve: what is not admitted is preempted, and waits on the host.
        Policy(
            "slos_serve",
            OnDemand(),
            SoftAdmission(),
            WithinBounds(),
            Stateless(),
            LastInOrder(keeps_state=True),
        ),
        # CacheTTL: pages of programs are held while their tools run.
        Policy("cache_ttl", OnDemand(), ProgramFirst(), Unified(), HeldForTools()),
        # Our own.
        Policy(
            "auto",
            Expected(),
            TailFirst(),
            Unified(heeds_arrivals=True),
            Tiered(learns_reuse=True),
            LongestRemaining(),
        ),
        # As auto, until lengths and step times are known; then a runtime plans a schedule for its
        # latency bound, and adapts it. A simulation runs it as auto.
        Policy(
            "exegpt",
            Expected(),
            TailFirst(),
            Unified(heeds_arrivals=True),
            Tiered(learns_reuse=True),
            LongestRemaining(),
            is_planned=True,
        ),
    )
}


def get_policy(policy: str | Policy) -> Policy:
    """Return the preset of that name, or the policy itself; InvalidConfigError if unknown."""
    if isinstance(policy, Policy):
        return policy
    if policy not in PRESETS:
        raise InvalidConfigError(
            f"policy={policy!r} is not a preset; choose one of {', '.join(sorted(PRESETS))}, "
            "or build a jaxserve.scheduling.policy.Policy"
        )
    return PRESETS[policy]


def get_policy_for(policy: str | Policy, *, has_groups: bool) -> Policy:
    """Return `get_policy(policy)`; a planned policy becomes workload-aware on two device groups.

    Plans count memory by expected lengths, and so does its admission there, as on one group.
    """
    found = get_policy(policy)
    if not (has_groups and found.is_planned and found.num_device_groups == 1):
        return found
    return replace(
        found,
        iteration=PRESETS["exegpt_waa_c"].iteration,
        retention=Stateless(),
        preemption=LongestRemaining(keeps_state=False),
    )


def check_heeded(request: Request, policy: Policy) -> None:
    """Raise UnheededBoundError for latency bounds of a request that the policy does not heed."""
    if not request.has_bounds or policy.order.heeds_bounds:
        return
    bounds = ", ".join(f"{name}={bound_s:.4g}" for name, bound_s in request.params.bounds.items())
    heeding = ", ".join(name for name, each in PRESETS.items() if each.order.heeds_bounds)
    raise UnheededBoundError(
        f"request {request.id}: {bounds} s, and policy {policy.name!r} heeds no bounds of single "
        f"requests; leave them out, or serve with one of these policies: {heeding}"
    )
