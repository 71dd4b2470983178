"""Checks a policy's invariants over random traces, without a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import get_policy
from jaxserve.testing.traces import Trace


@final
@dataclass(frozen=True, kw_only=True)
class PolicyCheck:
    """The traces of a check. A policy that reserves too little shows in its preemptions.

    Attributes:
      num_preemptions: of all sequences.
      num_prefix_hit: prompt tokens whose KV was reused from earlier requests.
    """

    num_traces: int
    num_requests: int
    num_tokens: int
    num_preemptions: int
    num_prefix_hit: int


def check_policy(
    policy: str | Policy, *, num_traces: int = 100, first_seed: int = 0
) -> PolicyCheck:
    """Serve random traces under a policy, and compare every request with a run of it alone.

    Each trace has a random machine, requests that arrive, are cancelled, and sometimes fail, and
    predictions that are right, wrong or missing. The simulated model's tokens depend on every cell
    of the context as it is read through the page table. Under a policy that keeps pages, prompts
    share prefixes, and answers are followed by further turns. A trace takes about 10 ms.

    Args:
      policy: a policy, or a preset's name.
      num_traces: traces to run, with the seeds from `first_seed` on.

    Raises:
      AssertionError: the message names the seed and the failure: a request ended with other tokens
        than alone, or twice, or never; pages or slots were lost; or nothing advanced.
      InvalidConfigError: no preset has that name.
    """
    policy = get_policy(policy)
    num_requests = num_tokens = num_preemptions = num_prefix_hit = 0
    for seed in range(first_seed, first_seed + num_traces):
        trace = Trace(
            seed, with_faults=seed % 2 == 0, with_conversations=policy.retention.keeps_pages
        )
        together = trace.check(policy, cancel_rate=0.02 if seed % 3 else 0.0)
        num_requests += len(trace.asked)
        num_tokens += sum(len(outcome.output) for outcome in together.values())
        num_preemptions += sum(outcome.num_preemptions for outcome in together.values())
        num_prefix_hit += int(trace.counters["num_prefix_hit"])
    return PolicyCheck(
        num_traces=num_traces,
        num_requests=num_requests,
        num_tokens=num_tokens,
        num_preemptions=num_preemptions,
        num_prefix_hit=num_prefix_hit,
    )
