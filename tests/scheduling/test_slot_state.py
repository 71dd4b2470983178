"""Models with states in slots: sequences begin with a snapshot of a state, or anew."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.scheduling.presets import PRESETS
from jaxserve.testing import Trace
from tests.common.tiers import seeds, some

POLICIES = [
    *("auto", "concurrent_instances", "exegpt_rra", "fastertransformer", "flover", "orca"),
    *("pensieve", "pensieve_device_only", "s3", "s3_oracle", "vllm_like"),
]


def state_trace(seed: int, num_snapshots: int = 0, **options: bool) -> Trace:
    """Return a random trace of a model whose sequences have states."""
    trace = Trace(seed, **options)
    trace.config = replace(
        trace.config,
        has_slot_state=True,
        num_snapshots=num_snapshots,
        num_host_pages=0,
        restore="on_admission",
    )
    return trace


@seeds(20, 10)
@pytest.mark.parametrize("policy", some(POLICIES))
def test_random_traces(seeds, policy):
    """Requests have the tokens that they have alone, and no page is kept, shared or swapped.

    The simulated model refuses rows that do not begin where the state of their slot ends.
    """
    num_preempted = 0
    for seed in seeds:
        trace = state_trace(seed, with_faults=seed % 2 == 0, with_conversations=True)
        together = trace.check(PRESETS[policy], cancel_rate=0.02 if seed % 3 else 0.0)
        num_preempted += sum(outcome.num_preemptions for outcome in together.values())
        assert trace.counters["num_prefix_hit"] == 0
        assert trace.counters["num_pages_out"] == trace.counters["num_pages_in"] == 0
    assert num_preempted or policy not in ("auto", "vllm_like", "s3")


@pytest.mark.parametrize("policy", some([*POLICIES, "mlfq"]))
@seeds(200, 12)
def test_sequences_begin_with_snapshots(policy, seeds):
    """Requests have the tokens that they have alone, with forks, evictions and preemptions.

    The simulated model's states depend on all tokens, so that a wrong snapshot is refused.
    """
    num_found = num_restored = 0
    for seed in seeds:
        trace = state_trace(seed, 1 + seed % 7, with_faults=seed % 2 == 0, with_conversations=True)
        rates = dict(cancel_rate=0.02, update_rate=0.01) if seed % 3 else {}
        trace.check(PRESETS[policy], **rates)
        num_found += trace.counters["num_prefix_hit"]
        num_restored += trace.counters["num_snapshots_restored"]
    keeps = PRESETS[policy].retention.keeps_pages
    assert (num_restored > 0) == keeps and (num_found > 0) == keeps
