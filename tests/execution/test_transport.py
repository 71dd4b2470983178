"""Two device groups that belong to different processes, both of which are threads here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

import jax
import numpy as np
import pytest
from flax import nnx
from jax.experimental import transfer
from jax.sharding import Mesh

from jaxserve import Runtime, SamplingParams
from jaxserve.core.clock import WallClock
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.request import Request
from jaxserve.engine.engine import Engine
from jaxserve.execution.build import ExecutorSpec, build_executor
from jaxserve.execution.device import DeviceExecutor
from jaxserve.execution.processes import (
    FollowerReport,
    LeadingExecutor,
    ProcessExecutor,
    in_group,
)
from jaxserve.execution.transport import HostTransport, KVTransport, cuts_of, make_transport
from jaxserve.execution.weights import sharded
from jaxserve.scheduling.admission import OnDemand
from jaxserve.scheduling.iteration.waa import WAA
from jaxserve.scheduling.plan import LINK, Handover, StepPlan
from jaxserve.scheduling.presets import PRESETS
from jaxserve.sharding import DeviceGroups, JoinError, make_groups
from jaxserve.testing.tiny import OPTIONS, random_prompts, tiny_llama
from tests.common.process_groups import connected
from tests.common.tiers import some

# Pages on demand, so that a small pool preempts; several iterations of a decode step.
POLICY = replace(
    PRESETS["exegpt_waa_c"],
    name="waa on demand",
    admission=OnDemand(0.0),
    iteration=WAA(encode_batch=4, decode_iterations=2),
)
PROMPTS = random_prompts(8, longest=60)
PARAMS = [
    # Long answers, which meet in the pool however late their prompts come over; and one token.
    SamplingParams(max_tokens=(1, 22, 24, 28, 30)[i % 5], temperature=0.8 * (i % 2), seed=i)
    for i in range(len(PROMPTS))
]
NUM_PAGES = 14


def _executors(groups: DeviceGroups, **options: Any) -> list[DeviceExecutor]:
    """Return an executor of each group, with pools of one size."""
    model = tiny_llama(num_heads=8)
    graphdef, params = nnx.split(model)
    given = dict(policy=POLICY, host_memory=0)
    spec = ExecutorSpec(
        graphdef=graphdef,
        model_config=model.config,
        layer_layout=model.layer_layout,
        options=RuntimeOptions.parse(OPTIONS | given | options),
    )
    found = []
    for mesh in groups.both:
        assert isinstance(mesh, Mesh)
        own = sharded(params, mesh, model.config)
        executor, _ = build_executor(spec, own)
        assert isinstance(executor, DeviceExecutor)
        executor.resize(NUM_PAGES, ())
        found.append(executor)
    return found


@contextmanager
def _led(
    executors: Sequence[DeviceExecutor],
    leads: int,
    transports: Callable[..., KVTransport] = make_transport,
) -> Iterator[ProcessExecutor]:
    """Yield the leader's executor, of one of two groups, while a thread follows with the other.

    Args:
      leads: index of the group whose devices are the leader's.
      transports: see `in_group`.
    """
    processes = ((leads,), (1 - leads,))
    own = executors[leads], executors[1 - leads]
    with ThreadPoolExecutor() as pool:  # they agree on how pages pass
        role = partial(in_group, processes=processes, transports=transports)
        leader, follower = pool.map(role, own, connected())
    thread = threading.Thread(target=follower.follow)
    thread.start()
    try:
        yield leader
    finally:
        leader.close()
        thread.join()
        follower.close()


def _answers(executor: Any) -> list[tuple[int, ...]]:
    engine = Engine(executor, POLICY, WallClock())
    sequences = [
        sequence
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
        for sequence in engine.add(
            Request(id=str(i), prompt=prompt, params=params, arrival_s=0.0, seed=params.seed or 0)
        )
    ]
    while engine.has_work:
        engine.step()
    assert sum(sequence.num_preemptions for sequence in sequences) > 0
    return [tuple(sequence.output) for sequence in sequences]


def _no_server(*_: Any) -> Any:
    raise jax.errors.JaxRuntimeError("no port is free")


@final
class _Unreachable:
    """A server at an address that no other process reaches."""

    def __init__(self, *args: Any):
        self._server = transfer.start_transfer_server(*args)

    def address(self) -> str:
        return "127.0.0.1:9"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


WAYS = pytest.mark.parametrize(
    "transports",
    [make_transport, partial(make_transport, serve=_no_server)],
    ids=["by transfer", "through the host"],
)


@pytest.mark.release
@pytest.mark.parametrize(
    ("groups", "leads"),
    some([(make_groups(encode=4, decode=2), 0), (make_groups(encode=1, decode=4), 1)], 1),
    ids=["the leader computes prompts", "the leader computes answers"],
)
@WAYS
def test_pages_pass_between_other_numbers_of_shards(groups, leads, transports, caplog):
    """They have eight bits, and scales, and a KV head more than once; the pool preempts."""
    options = dict(kv_dtype="int8")
    with Runtime(tiny_llama(num_heads=8), **OPTIONS, **options) as rt:
        wanted = [completion.token_ids for completion in rt.generate(PROMPTS, PARAMS)]
    executors = _executors(groups, kv_dtype="int8")
    with _led(executors, leads, transports) as leader:
        assert _answers(leader) == wanted
    assert ("no port is free" in caplog.text) == (transports is not make_transport)


def test_pages_that_the_other_group_has_lost(caplog):
    """The leader raises nothing and writes nothing, so that the sequences are computed anew."""
    _, decode = _executors(make_groups(encode=1, decode=1))
    first, second = connected()
    transport = HostTransport(1, decode.pages, *cuts_of(decode.page_pools))
    leader = LeadingExecutor(decode, first, ((1,), (0,)), transport)
    plan = StepPlan(index=0, handovers=(Handover(0, 0, 1, (1,)),), group=LINK)
    handle = leader.submit(plan)
    assert second.receive() == plan and not handle.is_ready()
    second.report(FollowerReport(0, "the device fell off the bus"))
    arrived = handle.collect().arrived
    assert arrived is not None and not arrived.any()
    assert "KV of 1 sequences was lost: the device fell off the bus" in caplog.text
    leader.close()


@WAYS
def test_pages_that_another_sequence_has_meanwhile_are_not_written(transports):
    """A page of the target that is in a later plan's page table keeps its contents."""
    executors = _executors(make_groups(encode=1, decode=1))
    source, target = (each.pages for each in executors)
    with _led(executors, 0, transports) as leader:
        source.replace(jax.tree.map(lambda leaf: leaf + 1, source.cache))
        plan = StepPlan(index=0, handovers=(Handover(0, 0, 1, (1, 2)),), group=LINK)
        handle = leader.submit(plan)
        leader.submit(StepPlan(index=1, group=1, page_updates=((0, 0, 2),))).collect()
        handle.collect()
        leader.submit(StepPlan(index=2, group=1)).collect()  # the follower has written them now
        keys = np.asarray(target.cache.k_pages[0])
    assert [keys[0, page].max() for page in (1, 2, 3)] == [1, 0, 0]


def test_processes_that_cannot_reach_each_other_go_through_the_host(caplog):
    """They find out before the first handover."""
    executors = _executors(make_groups(encode=1, decode=1))
    makers = partial(make_transport, serve=_Unreachable, patience_s=0.1)
    with _led(executors, 0, makers) as leader:
        plan = StepPlan(index=0, handovers=(Handover(0, 0, 1, (1,)),), group=LINK)
        assert leader.submit(plan).collect().arrived is None
    assert "process 0 got nothing within 0.1 s" in caplog.text


def test_pages_whose_transfer_fails_are_lost(caplog):
    """The target keeps its contents, and later pages arrive."""
    executors = _executors(make_groups(encode=1, decode=1))
    source, target = (each.pages for each in executors)
    ones = jax.tree.map(lambda leaf: leaf + 1, source.cache)
    with _led(executors, leads=0) as leader:
        source.replace(jax.tree.map(_broken, source.cache))
        plan = StepPlan(index=0, handovers=(Handover(0, 0, 1, (1,)),), group=LINK)
        arrived = leader.submit(plan).collect().arrived
        source.replace(ones)
        plan = StepPlan(index=1, handovers=(Handover(0, 0, 1, (2,)),), group=LINK)
        assert leader.submit(plan).collect().arrived is None
        leader.submit(StepPlan(index=2, group=1)).collect()  # the follower has written it now
        keys = np.asarray(target.cache.k_pages[0])
    assert arrived is not None and not arrived.any()
    assert "KV of 1 sequences was lost" in caplog.text and "off the bus" in caplog.text
    assert [keys[0, page].max() for page in (1, 2)] == [0, 1]


def _broken(leaf: jax.Array) -> jax.Array:
    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return transfer.make_error_array(shape, "the device fell off the bus")


def test_a_follower_may_leave_while_the_leader_still_closes():
    """The leader, which would end with an error otherwise, has let go of the others before."""
    first, second = connected()
    first.claim()
    first.let_go()
    with ThreadPoolExecutor() as pool:
        left = pool.submit(second.leave)
        time.sleep(0.1)  # until the leader knows
        first.release()
        with pytest.raises(JoinError, match="has left the job"):
            first.claim()
        first.leave()
        assert left.result() is None
