"""New weights at random times, on the simulated executor: pages add up, and old ones are gone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from jaxserve.memory.disk_tier import DiskTier
from jaxserve.memory.eviction import LRU
from jaxserve.memory.page_files import PageFiles
from jaxserve.scheduling.admission.on_demand import OnDemand
from jaxserve.scheduling.iteration.iteration_level import IterationLevel
from jaxserve.scheduling.order.fcfs import FCFS
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.preemption.last_in_order import LastInOrder
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.retention.device_only import DeviceOnly
from jaxserve.scheduling.retention.tiered import Tiered
from jaxserve.testing import Trace
from tests.common.tiers import seeds, some

SWAPS = LastInOrder(keeps_state=True)
POLICIES = [
    PRESETS["auto"],
    PRESETS["pensieve"],
    PRESETS["s3"],
    # Preempted sequences have separate host pages, besides those that are cached on the device.
    Policy("swapped", OnDemand(0.0), FCFS(), IterationLevel(), DeviceOnly(LRU()), SWAPS),
]


@seeds(30)
@pytest.mark.parametrize("policy", some(POLICIES), ids=lambda policy: policy.name)
def test_requests_go_on_with_new_weights(seeds, policy: Policy):
    """KV is kept or computed anew, no page of former weights is found, and every request ends.

    The simulated weights are always the same, so that tokens are those of a run without updates.
    """
    counts: Counter[str] = Counter()
    for seed in seeds:
        trace = Trace(seed, with_faults=seed % 2 == 0, with_conversations=True)
        together = trace.run(policy, cancel_rate=0.02 if seed % 3 else 0.0, update_rate=0.1)
        for key, alone in trace.expected().items():
            assert together[key].agrees_with(alone), f"seed {seed}, {key}"
        counts["found"] += int(trace.counters["num_prefix_hit"])
    assert counts["found"] > 0 or not policy.retention.keeps_pages, counts


@pytest.mark.release
def test_pages_of_former_weights_stay_on_the_disk_unfound(tmp_path):
    """A later run with the first weights finds those that were written before the first update."""
    policy = replace(PRESETS["pensieve"], retention=Tiered(free_share=0.5))
    num_found = 0
    for seed in range(10):
        for rate in (0.05, 0.0):
            trace = Trace(seed, with_conversations=True)
            disk = DiskTier(PageFiles(tmp_path / str(seed), 50_000))
            together = trace.run(policy, update_rate=rate, disk=disk)
            for key, alone in trace.expected().items():
                assert together[key].output == alone.output, f"seed {seed}, {key}"
        num_found += trace.counters["num_prefix_hit_on_disk"]
    assert num_found > 0
