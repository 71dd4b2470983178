"""New weights at random times, on the simulated executor: pages add up, and old ones are gone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.engine.answers import Weights
from jaxserve.memory.disk_tier import DiskTier, PageFiles
from jaxserve.memory.eviction import LRU
from jaxserve.scheduling.admission import OnDemand
from jaxserve.scheduling.iteration.continuous import IterationLevel
from jaxserve.scheduling.order import FCFS
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.preemption import LastInOrder
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.retention import DeviceOnly, Tiered
from jaxserve.scheduling.sequence import Sequence
from jaxserve.testing import Trace
from tests.common.tiers import seeds, some
from tests.scheduling.simulated import engine_of, request_of, run_to_end

SWAPS = LastInOrder(keeps_state=True)
POLICIES = [
    PRESETS["auto"],
    PRESETS["pensieve"],
    PRESETS["s3"],
    # Preempted sequences have separate host pages, besides those that are cached on the device.
    Policy("swapped", OnDemand(0.0), FCFS(), IterationLevel(), DeviceOnly(LRU()), SWAPS),
]


@seeds(30, 10)
@pytest.mark.parametrize("policy", some(POLICIES), ids=lambda policy: policy.name)
def test_requests_go_on_with_new_weights(seeds, policy: Policy):
    """KV is kept or computed anew, no page of former weights is found, and every request ends.

    The simulated weights are always the same, so that tokens are those of a run without updates.
    """
    counts: Counter[str] = Counter()
    for seed in seeds:
        trace = Trace(seed, with_faults=seed % 2 == 0, with_conversations=True)
        trace.check(policy, cancel_rate=0.02 if seed % 3 else 0.0, update_rate=0.1)
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


@pytest.mark.fast
def test_pages_of_mixed_weights_are_not_found():
    """A sequence that began with former weights leaves no page under the name of the new ones."""
    config = EngineConfig(
        page_size=4,
        num_pages=41,
        max_slots=4,
        max_context=64,
        max_step_tokens=64,
        max_decode_iterations=4,
    )
    clock, prompt = VirtualClock(), tuple(range(1, 23))
    engine = engine_of("auto", config, clock)

    def begin(name: str) -> Sequence:
        [sequence] = engine.add(request_of(name, prompt, clock.now(), max_tokens=12))
        engine.step()
        return sequence

    sequence = begin("former")
    engine.drain()
    engine.weights_changed(Weights(1), engine.name_of(1), keeps_kv=True)
    while engine.has_work:
        engine.step()
    assert len(sequence.known_tokens) == 34
    assert engine.residency(sequence.known_tokens) == ["nowhere"] * 8
    sequence = begin("new")
    while engine.has_work:
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.residency(sequence.known_tokens) == ["device"] * 8


@pytest.mark.fast
def test_kv_on_the_host_is_computed_anew_with_new_weights():
    """A preempted sequence whose pages wait on the host loses them, as running ones do theirs."""
    config = EngineConfig(
        page_size=4,
        num_pages=14,
        max_slots=4,
        max_context=48,
        max_step_tokens=64,
        max_decode_iterations=4,
        num_host_pages=40,
    )
    engine = engine_of(POLICIES[3], config)
    for name in "ab":
        engine.add(request_of(name, tuple(range(1, 21)), max_tokens=20))
    while not any(sequence.kv.host_pages for sequence in engine.scheduler.waiting):
        engine.step()
    engine.drain()
    engine.weights_changed(Weights(1), engine.name_of(1), keeps_kv=False)
    sequences = (*engine.scheduler.running, *engine.scheduler.waiting)
    assert len(sequences) == 2
    assert not any(s.kv.host_pages or s.kv.num_computed for s in sequences)
    run_to_end(engine)
    assert {len(sequence.output) for sequence in sequences} == {20}
