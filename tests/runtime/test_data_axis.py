"""Replicas over the data axis have one replica's answers, share its weights and keep its limits."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import InvalidRequestError, PromptTooLongError
from jaxserve.sharding import make_mesh, replica_meshes, split_replicas, state_shardings
from jaxserve.testing import RecordingExecutor, WrapAll, tiny
from jaxserve.testing.tiny import MAX_CONTEXT, random_prompts, tiny_llama
from tests.runtime.serving import weights

OPTIONS = tiny.OPTIONS | {"strict": True, "warmup": True}
# The number of pages is equal in both cases, since a shard holds half of the heads.
WHOLE, SHARDED = OPTIONS | {"kv_memory": "60KB"}, OPTIONS | {"kv_memory": "30KB"}
PROMPTS = random_prompts(24, longest=60)
# Greedy and sampled, with and without a seed, short and long.
PARAMS = [
    SamplingParams(
        max_tokens=8 + 3 * i, temperature=0.8 * (i % 2), seed=i if i % 3 else None, n=1 + i % 2
    )
    for i in range(len(PROMPTS))
]
SHORT = SamplingParams(max_tokens=9)

Tokens = list[list[tuple[int, ...]]]


def _tokens(completions) -> Tokens:
    return [[sample.token_ids for sample in c.samples] for c in completions]


def _on(mesh: Mesh, seed: int) -> nnx.State:
    """Return the parameters as a data-parallel trainer on this mesh has them."""
    return jax.device_put(weights(seed), state_shardings(weights(seed), mesh))


def _buffers(tree) -> list[list[int]]:
    """Return the address of each shard of each array, by device."""
    return [
        [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]
        for leaf in jax.tree.leaves(tree)
    ]


def _buffers_of_replicas(seen: WrapAll) -> list[list[int]]:
    parts = [_buffers(executor.params) for executor in seen.executors]
    return [sum(shards, []) for shards in zip(*parts, strict=True)]


def _admissions(executor: RecordingExecutor) -> Counter[tuple[str, int]]:
    """Return how often each sample of each request got a slot."""
    admissions = (new for plan in executor.plans for new in plan.admissions)
    return Counter((new.request.id, new.sample_index) for new in admissions)


@final
@dataclass(frozen=True)
class Wanted:
    """The answers of one replica on one device: to all prompts, and to some with other weights."""

    everything: Tokens
    updated: Tokens


@pytest.fixture(scope="module")
def wanted() -> Wanted:
    with Runtime(tiny_llama(), **WHOLE) as rt:
        done = rt.generate(PROMPTS, PARAMS)
        assert all(c.error is None for c in done)
        rt.update_params(weights(1))
        return Wanted(_tokens(done), _tokens(rt.generate(PROMPTS, SHORT)))


@pytest.fixture(scope="module")
def seen() -> WrapAll[RecordingExecutor]:
    """The executors of the two replicas."""
    return WrapAll(RecordingExecutor)


@pytest.fixture(scope="module")
def runtime(wanted, seen) -> Iterator[Runtime]:
    """Two replicas over two devices each, which have answered all prompts as one replica does."""
    mesh = make_mesh(data=2, tensor=2)
    weights = _on(mesh, 0)
    with Runtime(tiny_llama(), weights, mesh=mesh, wrap_executor=seen, **SHARDED) as rt:
        assert _buffers_of_replicas(seen) == _buffers(weights), "no copy"
        assert _tokens(rt.generate(PROMPTS, PARAMS)) == wanted.everything
        yield rt
        caches = jax.tree.leaves([executor.pages.cache for executor in seen.executors])
        pending = [rt.submit([1, 2, 3], SamplingParams(max_tokens=None)) for _ in range(6)]
    assert {one.result(10).finish_reason for one in pending} <= {"cancelled", "error", "length"}
    assert all(array.is_deleted() for array in caches)
    assert not any(thread.name == "jaxserve-engine" for thread in threading.enumerate())


@pytest.mark.release
def test_replicas_answer_alike_under_preemption(runtime, seen):
    """Both replicas have the tokens of one, although their page pools are too small."""
    report, stats = runtime.report(), runtime.stats()
    assert stats.num_compilations == 0
    assert report.num_pages == 2 * (runtime.config.num_pages - 1)
    admissions = [_admissions(executor) for executor in seen.executors]
    counts = [found.total() - len(found) for found in admissions]
    assert min(counts) > 0 and stats.num_preemptions == sum(counts)
    runtime.check_integrity()


@pytest.mark.release
def test_the_report_tells_replicas_apart(runtime, tmp_path):
    """Each replica has a track of steps; the picture shows their sum."""
    report = runtime.report()
    times = [step.submitted_s for step in report.steps]
    assert times == sorted(times) and {step.replica for step in report.steps} == {0, 1}
    assert max(report.figures()["pages_owned"].values()) <= report.num_pages
    report.save_trace(tmp_path / "trace.json")
    assert "pages of replica 1" in (tmp_path / "trace.json").read_text()
    assert report._repr_png_().startswith(b"\x89PNG")


@pytest.mark.release
def test_every_way_in_serves(runtime, wanted):
    """Streams, single requests and cancellation reach the replica of their request."""
    single = runtime.generate(PROMPTS[0], SamplingParams(max_tokens=8))
    assert [single.token_ids] == wanted.everything[0]
    streamed = [p.token_ids for p in runtime.stream(PROMPTS[0], SamplingParams(max_tokens=8))]
    assert sum(streamed, ()) == single.token_ids
    ids = [f"mine-{i}" for i in range(6)]
    params = SamplingParams(max_tokens=None)
    pending = [runtime.submit([1, 2], params, request_id=name) for name in ids]
    with pytest.raises(InvalidRequestError, match="still running"):
        for name in reversed(ids):
            runtime.submit([3], request_id=name)
    for one in pending:
        one.cancel()
    assert {one.result(60).finish_reason for one in pending} <= {"cancelled", "length"}
    again = runtime.submit([3], SamplingParams(max_tokens=2), request_id=ids[0])
    assert len(again.result(60).token_ids) == 2
    with pytest.raises(PromptTooLongError):
        runtime.generate([1] * MAX_CONTEXT)


@pytest.mark.release
def test_requests_of_one_prefix_share_a_replica(runtime, seen):
    """A conversation that resends its history goes to the replica of its earlier turns."""

    def counts():
        return [len(_admissions(executor)) for executor in seen.executors]

    history, before = list(range(20)), counts()
    for _ in range(3):
        done = runtime.generate(history, SamplingParams(max_tokens=3))
        history += [*done.token_ids, 7]
    more = [after - was for after, was in zip(counts(), before, strict=True)]
    assert sorted(more) == [0, 3]


@pytest.mark.release
def test_an_update_reaches_every_replica_under_load(runtime, seen, wanted):
    """Earlier requests are answered with the old weights, and later ones with the new weights.

    Weights on the mesh are not copied, others are moved, and nothing is compiled.
    """
    new = _on(make_mesh(data=2, tensor=2), 1)
    seeded = [i for i, one in enumerate(PARAMS) if one.seed is not None]
    pending = [runtime.submit(PROMPTS[i], PARAMS[i]) for i in seeded]
    updates = [threading.Thread(target=runtime.update_params, args=(new,)) for _ in range(2)]
    for update in updates:
        update.start()
    assert _tokens(p.result(120) for p in pending) == [wanted.everything[i] for i in seeded]
    for update in updates:
        update.join(60)
        assert not update.is_alive()
    assert _buffers_of_replicas(seen) == _buffers(new)
    assert _tokens(runtime.generate(PROMPTS, SHORT)) == wanted.updated
    runtime.update_params(weights(0))
    assert _tokens(runtime.generate(PROMPTS[:1], PARAMS[:1])) == wanted.everything[:1]
    assert runtime.stats().num_compilations == 0


def test_replica_meshes_keep_the_other_axes():
    """The number of meshes is the size of the data axis, and they share no device."""
    mesh = make_mesh(data=2, tensor=2)
    parts = replica_meshes(mesh)
    assert [dict(part.shape) for part in parts] == [{"data": 1, "stage": 1, "tensor": 2}] * 2
    assert np.concatenate([p.devices for p in parts]).tolist() == mesh.devices.tolist()


def test_what_has_no_whole_replicas_stays_in_one_piece():
    """Arrays on one device, on a mesh without replicas, or split over the data axis are whole."""
    array = np.arange(8.0)
    mesh = make_mesh(data=2, tensor=2)
    for sharding in (
        jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        NamedSharding(make_mesh(tensor=2), PartitionSpec("tensor")),
        NamedSharding(mesh, PartitionSpec("data")),
        NamedSharding(mesh, PartitionSpec(("data", "tensor"))),
    ):
        tree = {"a": jax.device_put(array, sharding)}
        assert split_replicas(tree) == [tree]
    parts = split_replicas(jax.device_put(array, NamedSharding(mesh, PartitionSpec("tensor"))))
    assert [part.tolist() for part in parts] == [array.tolist()] * 2
