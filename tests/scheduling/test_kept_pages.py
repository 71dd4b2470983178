"""Conversations have the same tokens when pages are cached, shared, evicted, copied and restored.

The simulated model's tokens depend on every cell of its context as read through the page table.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from jaxserve.memory.disk_tier import DiskTier, PageFiles
from jaxserve.memory.eviction import LRU
from jaxserve.scheduling.admission import OnDemand
from jaxserve.scheduling.iteration.continuous import IterationLevel, Unified
from jaxserve.scheduling.iteration.request_level import Concurrent
from jaxserve.scheduling.order import FCFS, Priority
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.preemption import LastInOrder
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.retention import DeviceOnly, Tiered
from jaxserve.testing import Outcome, Trace
from tests.common.tiers import some
from tests.memory.gate import PoorFiles, spoil

pytestmark = pytest.mark.fast

SWAPS = LastInOrder(keeps_state=True)
POLICIES = [
    PRESETS["pensieve"],
    PRESETS["pensieve_device_only"],
    PRESETS["cache_ttl"],
    replace(PRESETS["s3"], name="s3_tiered", retention=Tiered()),
    replace(PRESETS["auto"], name="auto_tiered", retention=Tiered(LRU(), free_share=1.0)),
    Policy("chunks", OnDemand(0.0), Priority(), Unified(3), Tiered(free_share=0.5), SWAPS),
    # Preempted sequences have separate host pages, besides those that are cached on the device.
    Policy("swapped", OnDemand(0.0), FCFS(), IterationLevel(), DeviceOnly(LRU()), SWAPS),
    Policy("one_by_one", OnDemand(0.0), FCFS(), Concurrent(), Tiered(free_share=0.0)),
    replace(PRESETS["fastertransformer"], name="static_tiered", retention=Tiered()),
]
DISK_POLICIES = [
    replace(PRESETS["pensieve"], retention=Tiered(free_share=0.5)),
    replace(PRESETS["fastertransformer"], name="static_tiered", retention=Tiered(free_share=1.0)),
    Policy("one_by_one", OnDemand(0.0), FCFS(), Concurrent(), Tiered(free_share=0.5)),
]
TIERED = [policy for policy in POLICIES if isinstance(policy.retention, Tiered)]
NUM_SEEDS = 30


def _trace(seed: int) -> Trace:
    return Trace(seed, with_faults=seed % 2 == 0, with_conversations=True)


def _check_cut(trace: Trace, together: dict[tuple[str, int], Outcome]) -> None:
    """Check that each answer is that of the request alone, or its beginning."""
    for key, alone in trace.expected().items():
        got = together[key].output
        assert got == alone.output[: len(got)], f"seed {trace.seed}, {key}"


@pytest.mark.parametrize("policy", some(POLICIES), ids=lambda policy: policy.name)
def test_conversations_have_the_tokens_of_fresh_runs(policy: Policy):
    """Evictions, swaps, drops, cancellations and preemption do not change tokens or lose pages."""
    counts = Counter()
    for seed in range(NUM_SEEDS):
        trace = _trace(seed)
        trace.check(policy, cancel_rate=0.02 if seed % 3 else 0.0)
        counts["found"] += trace.counters["num_prefix_hit"]
        counts["found on the host"] += trace.counters["num_prefix_hit_on_host"]
        counts["lost"] += trace.counters["num_evicted_tokens"]
        counts["prefetched"] += trace.counters["num_pages_prefetched"]
        counts["gaps"] += trace.num_gaps
    assert counts["found"] > 1000 and counts["lost"] > 100 and counts["gaps"] > 0, counts
    is_tiered = isinstance(policy.retention, Tiered)
    assert (counts["found on the host"] > 0) == is_tiered == (counts["prefetched"] > 0), counts


@pytest.mark.release
@pytest.mark.parametrize("incoming_pages", some([1, 2]))
@pytest.mark.parametrize("policy", some(TIERED), ids=lambda policy: policy.name)
def test_pages_that_come_over_several_plans(policy: Policy, incoming_pages: int):
    """Nothing is computed, by the sequence or by others with its prefix, before its pages came.

    In between it is cancelled or preempted, the pool is resized, and the weights are exchanged.
    """
    counts = Counter()
    for seed in range(2 * NUM_SEEDS):
        trace = Trace(seed, with_conversations=True, incoming_pages=incoming_pages)
        if seed % 2:
            trace.check(policy, cancel_rate=0.05)
        else:
            _check_cut(trace, trace.run(policy, resize_rate=0.05, update_rate=0.05))
        counts["awaited"] += trace.num_awaited
        counts["preempted"] += trace.counters["num_preemptions"]
    assert counts["awaited"] > 5 and counts["preempted"] > 20, counts


@pytest.mark.release
@pytest.mark.parametrize("policy", some(POLICIES[:6]), ids=lambda policy: policy.name)
def test_a_resized_pool_keeps_what_fits(policy: Policy):
    """Pages move, cached ones too; an answer is cut only if it no longer fits."""
    num_found = 0
    for seed in range(NUM_SEEDS):
        trace = _trace(seed)
        _check_cut(trace, trace.run(policy, resize_rate=0.1))
        num_found += trace.counters["num_prefix_hit"]
    assert num_found > 1000


@pytest.mark.release
@pytest.mark.parametrize("policy", some(DISK_POLICIES), ids=lambda policy: policy.name)
def test_a_restarted_engine_finds_on_the_disk_what_is_right(policy: Policy, tmp_path):
    """The same conversations run on damaged files, and on some folders and disks that fail."""
    num_found, num_corrupt = [0, 0], 0
    for seed in range(0, 60, 2):
        for run in range(2):
            trace = _trace(seed)
            folder = tmp_path / str(seed)
            files = PageFiles(folder, 20_000 if seed % 3 else 500)
            store = PoorFiles(files, random.Random(f"{seed} reads")) if run else files
            together = trace.run(policy, disk=DiskTier(store))
            assert sum(path.stat().st_size for path in folder.iterdir()) == files.num_bytes
            assert files.num_bytes <= (20_000 if seed % 3 else 500)
            for key, alone in trace.expected().items():
                assert together[key].output == alone.output, f"seed {seed}, run {run}, {key}"
            num_found[run] += trace.counters["num_prefix_hit_on_disk"]
            num_corrupt += files.num_corrupt
            spoil(folder, random.Random(seed))
    assert num_found[1] > 100 and num_corrupt > 10, (num_found, num_corrupt)
