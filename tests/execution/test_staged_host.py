"""Stages have host memory: preempted sequences and cached pages go there and come back."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import HostMemoryError, StepMemoryError
from jaxserve.scheduling.admission import OnDemand
from jaxserve.scheduling.preemption import LastInOrder
from jaxserve.scheduling.presets import PRESETS
from jaxserve.sharding import StagePlan
from jaxserve.testing import ExecutorWrapper, FaultyExecutor, FreeCopiesExecutor, WrapAll
from jaxserve.testing.tiny import OPTIONS, random_prompts, tiny_llama
from tests.common.tiers import some

# The first stage has two shards, of a KV head each.
PLAN = StagePlan.of([1, 1], tensor=[2, 1])
SWAPS = replace(
    PRESETS["vllm_like"],
    name="swaps",
    admission=OnDemand(0.0),
    preemption=LastInOrder(keeps_state=True),
)
PROMPTS = random_prompts(12, longest=60)
PARAMS = [
    SamplingParams(max_tokens=20 + i, temperature=0.8 * (i % 2), seed=i)
    for i in range(len(PROMPTS))
]
# Of the second stage, whose pages are the largest.
PAGE_BYTES = 2 * 8 * 8 * 4 * 2


@pytest.fixture(scope="module")
def wanted():
    """Return the tokens of one device with room for all."""
    with Runtime(tiny_llama(), policy="vllm_like", **OPTIONS) as rt:
        return [each.token_ids for each in rt.generate(PROMPTS, PARAMS)]


@pytest.mark.release
@pytest.mark.parametrize("restore", some(["prefetch", "per_layer"]))
def test_preempted_sequences_come_back(wanted, restore):
    """Greedy and drawn tokens are the same; sequences are cancelled; nothing compiles."""
    options = OPTIONS | dict(mesh=PLAN, policy=SWAPS, restore=restore, strict=True, warmup=True)
    seen = WrapAll(FreeCopiesExecutor)
    options |= dict(wrap_executor=seen, kv_memory=18 * PAGE_BYTES)
    with Runtime(tiny_llama(), **options) as rt:
        cancelled = [rt.submit(p, SamplingParams(max_tokens=60)) for p in PROMPTS[:3]]
        pending = [rt.submit(p, each) for p, each in zip(PROMPTS, PARAMS, strict=True)]
        while not rt.stats().num_preemptions:
            time.sleep(0.001)
        for each in cancelled:
            each.cancel()
        assert [each.result().token_ids for each in pending] == wanted
        assert {each.result().finish_reason for each in cancelled} <= {"cancelled", "length"}
        assert rt.stats().num_preemptions > 0 and rt.stats().num_pages_in > 0
        rt.check_integrity()
        costs = seen.executors[0].inner.swap_costs
        assert costs.page_s > 0 and costs.token_s > 0 and costs.position_s > 0


@pytest.mark.release
def test_a_page_is_read_and_written_in_the_parts_of_the_stages():
    """Contents are those of the first stage, then of the second one."""
    seen = WrapAll()
    with Runtime(tiny_llama(), mesh=PLAN, wrap_executor=seen, **OPTIONS):
        [executor] = seen.executors
        host, pools = executor.host_memory, executor.page_pools
        assert [pool.host.entry_bytes for pool in pools] == [PAGE_BYTES, PAGE_BYTES]
        assert host.entry_bytes == 2 * PAGE_BYTES
        contents = np.random.default_rng(0).bytes(2 * PAGE_BYTES)
        host.write(3, contents)
        assert host.read(3) == contents and host.has_arrived(3)
        assert [pool.host.read_bytes(3) for pool in pools] == [
            contents[:PAGE_BYTES],
            contents[PAGE_BYTES:],
        ]
        pools[1].swap(((1, 3),), ())
        assert host.read(3)[PAGE_BYTES:] == bytes(PAGE_BYTES)


@pytest.mark.release
def test_stages_go_on_after_a_step_without_memory(wanted):
    """The failed step's requests end with an error; all others are computed anew."""
    options = OPTIONS | dict(mesh=PLAN, policy=SWAPS, kv_memory=18 * PAGE_BYTES)

    def wrap(inner):
        return FreeCopiesExecutor(FaultyExecutor(inner, out_of_memory_every=9))

    with Runtime(tiny_llama(), **options, wrap_executor=wrap) as rt:
        done = rt.generate(PROMPTS, PARAMS)
        assert any(isinstance(each.error, StepMemoryError) for each in done)
        for each, tokens in zip(done, wanted, strict=True):
            assert each.error is not None or each.token_ids == tokens
        assert rt.stats().num_lost_steps > 0
        rt.check_integrity()


class _SmallHost(ExecutorWrapper):
    """A host without the memory for its pages."""

    def submit(self, plan):
        if plan.swaps_out:
            raise HostMemoryError("the host has no memory for 30 pages; pass a smaller host_memory")
        return self.inner.submit(plan)


@pytest.mark.release
def test_stages_go_on_without_host_pages_that_do_not_fit(wanted):
    """The first copies fail; from then on KV is computed anew."""
    options = OPTIONS | dict(mesh=PLAN, policy=SWAPS, kv_memory=18 * PAGE_BYTES)

    def wrap(inner):
        return FreeCopiesExecutor(_SmallHost(inner))

    with Runtime(tiny_llama(), **options, wrap_executor=wrap) as rt:
        assert [each.token_ids for each in rt.generate(PROMPTS, PARAMS)] == wanted
        assert rt.stats().num_lost_steps == 1 and rt.stats().num_pages_in == 0
        rt.check_integrity()
