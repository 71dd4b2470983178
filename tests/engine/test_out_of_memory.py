"""A step that runs out of the device's memory fails its own requests, and the engine goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import HostMemoryError, StepMemoryError
from jaxserve.core.request import Request
from jaxserve.engine.engine import Engine
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.memory.disk_tier import DiskTier, HostMemory, PageFiles
from jaxserve.scheduling.admission import OnDemand
from jaxserve.scheduling.iteration.continuous import Unified
from jaxserve.scheduling.order import FCFS
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.preemption import LastInOrder
from jaxserve.scheduling.presets import get_policy
from jaxserve.scheduling.retention import Stateless, Tiered
from jaxserve.testing import ExecutorWrapper, FaultyExecutor, FreeCopiesExecutor
from jaxserve.testing.tiny import OPTIONS, random_prompts, tiny_llama
from tests.common.tiers import some

CONFIG = EngineConfig(
    page_size=4, num_pages=40, max_slots=4, max_context=60, max_step_tokens=16, num_host_pages=30
)
_SWAPS = Policy(
    "swaps", OnDemand(0.0), FCFS(), Unified(), Stateless(), LastInOrder(keeps_state=True)
)
_GREEDY = SamplingParams(max_tokens=12)


def _outcomes(
    policy: str | Policy,
    wrap: Callable[[Any], Any] = lambda inner: inner,
    config: EngineConfig = CONFIG,
    before: Callable[[Engine], Any] = lambda engine: None,
) -> tuple[dict[str, tuple[int, ...]], dict[str, Any], int]:
    """Return the tokens and the errors of 24 requests, and the steps that were lost.

    Args:
      before: called before the first request.
    """
    clock = VirtualClock()
    engine = Engine(wrap(SimulatedExecutor(config, clock)), get_policy(policy), clock)
    before(engine)
    sequences = [
        *(
            each
            for number in range(24)
            for each in engine.add(
                Request(
                    id=f"{number}",
                    prompt=tuple(range(1 + number % 3, 20)),
                    params=SamplingParams(max_tokens=5 + number % 20),
                    arrival_s=float(number),
                )
            )
        )
    ]
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    errors = {each.request.id: each.error for each in sequences if each.error is not None}
    return (
        {each.request.id: tuple(each.output) for each in sequences},
        errors,
        engine.stats.num_lost_steps,
    )


@pytest.mark.parametrize("policy", some(["vllm_like", "s3", "pensieve", "auto"], 2, 3))
@pytest.mark.parametrize("every", [3, 7, 20])
def test_others_have_the_tokens_that_they_have_anyway(policy: str, every: int):
    """Their KV is computed anew, also where it was on the host or in the prefix cache."""
    wanted, _, _ = _outcomes(policy)
    found, errors, num_lost = _outcomes(
        policy, lambda inner: FaultyExecutor(inner, out_of_memory_every=every)
    )
    assert num_lost and errors
    assert all(type(error) is StepMemoryError for error in errors.values())
    for name, output in found.items():
        assert output == (wanted[name] if name not in errors else wanted[name][: len(output)])


class _SmallHost(ExecutorWrapper):
    """A host without the memory for its pages."""

    def submit(self, plan: Any) -> Any:
        if plan.swaps_out or plan.swaps_in:
            raise HostMemoryError("the host has no memory for 30 pages; pass a smaller host_memory")
        return self.inner.submit(plan)


@pytest.mark.parametrize("policy", [_SWAPS, "pensieve", "auto"])
def test_all_go_on_without_the_host_pages_that_do_not_fit(policy: str | Policy):
    """The first copies fail; from then on KV is computed anew, and none is copied."""
    config = replace(CONFIG, num_pages=25)
    wanted, _, _ = _outcomes(policy, config=config)
    found, errors, num_lost = _outcomes(
        policy, lambda inner: FreeCopiesExecutor(_SmallHost(inner)), config
    )
    assert found == wanted and not errors and num_lost == 1


class _NoTimings(ExecutorWrapper):
    """The host has no memory for the pages whose copies are timed."""

    def use_idle_time(self) -> bool:
        raise HostMemoryError("the host has no memory for 30 pages; pass a smaller host_memory")


def test_timings_without_memory_end_nothing(caplog):
    """Nothing is copied to the host from then on, and requests have their tokens."""
    wanted, _, _ = _outcomes("auto")
    went_on = []
    with caplog.at_level(logging.WARNING, "jaxserve"):
        found, errors, num_lost = _outcomes(
            "auto", _NoTimings, before=lambda engine: went_on.append(engine.use_idle_time())
        )
    assert went_on == [False] and "not copied to the host any more" in caplog.text
    assert found == wanted and not errors and num_lost == 0


class _NoRoomForTheDisk(ExecutorWrapper):
    """A host without the memory for pages that come from the disk."""

    @property
    def host_memory(self) -> HostMemory | None:
        return cast(HostMemory, _FullHost(self.inner.host_memory))


class _FullHost(ExecutorWrapper):
    """Forwards to a host memory what is not written."""

    def write(self, entry: int, contents: bytes) -> None:
        raise HostMemoryError("the host has no memory for 30 pages; pass a smaller host_memory")


def test_pages_from_the_disk_that_find_no_memory_end_nothing(tmp_path, caplog):
    """They are computed, and no later request finds what was not stored."""
    policy = replace(get_policy("pensieve"), retention=Tiered(free_share=1.0))
    found = []
    for wrap in (lambda inner: inner, _NoRoomForTheDisk):
        clock, disk = VirtualClock(), DiskTier(PageFiles(tmp_path, 1_000_000))
        executor = wrap(SimulatedExecutor(replace(CONFIG, num_pages=20), clock))
        engine = Engine(executor, policy, clock, disk=disk)
        prompts = [tuple(range(start, start + 30)) for start in (1, 100, 200)]
        params = SamplingParams(max_tokens=5)
        sequences = [
            engine.add(Request(id=f"{i}", prompt=prompt, params=params, arrival_s=0.0))[0]
            for i, prompt in enumerate(2 * prompts)
        ]
        with caplog.at_level(logging.WARNING, "jaxserve"):
            while engine.has_work:
                disk.flush()
                engine.step()
                engine.scheduler.check_integrity()
        found.append([each.output for each in sequences])
        engine.close(is_whole=True)
    assert found[0] == found[1] and "not copied to the host any more" in caplog.text


class _Twice(ExecutorWrapper):
    """The 4th step and the 12th run out of memory, one of them when it is collected."""

    def __init__(self, inner: Any):
        super().__init__(FaultyExecutor(inner, out_of_memory_every=4))

    def submit(self, plan: Any) -> Any:
        faulty = self.inner
        return (faulty if faulty.num_submitted < 8 else faulty.inner).submit(plan)


def test_a_device_goes_on():
    """The page cache and the slots are made anew; what is served next is right."""
    prompts = random_prompts(6, longest=20)
    with Runtime(tiny_llama(), policy="auto", **OPTIONS) as rt:
        wanted = [each.token_ids for each in rt.generate(prompts, _GREEDY)]
    with Runtime(tiny_llama(), policy="auto", wrap_executor=_Twice, **OPTIONS) as rt:
        done = rt.generate(prompts, _GREEDY)
        assert any(isinstance(each.error, StepMemoryError) for each in done)
        for each, tokens in zip(done, wanted, strict=True):
            assert each.error is not None or each.token_ids == tokens
        assert [each.token_ids for each in rt.generate(prompts, _GREEDY)] == wanted
        assert rt.stats().num_lost_steps >= 2
        rt.check_integrity()
