"""Replicas over the data axis: the answers of one, its weights uncopied, its limits kept."""

from __future__ import annotations

import threading
import time

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import EngineFailedError, InvalidRequestError, PromptTooLongError
from sharding import make_mesh, replica_meshes, split_replicas, state_shardings
from tests.tiny import MAX_CONTEXT, random_prompts, tiny_llama

OPTIONS = dict(
    max_slots=4, max_step_tokens=32, page_size=8, kv_memory="60KB", progress=False, strict=True
)
PROMPTS = random_prompts(24, longest=60)
# Greedy and sampled, with and without a seed of their own, short and long.
PARAMS = [
    SamplingParams(
        max_tokens=8 + 3 * i, temperature=0.8 * (i % 2), seed=i if i % 3 else None, n=1 + i % 2
    )
    for i in range(len(PROMPTS))
]


def _tokens(completions) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in c.samples] for c in completions]


@pytest.fixture(scope="module")
def wanted():
    """What one replica on one device answers."""
    with Runtime(tiny_llama(), **OPTIONS) as rt:
        done = rt.generate(PROMPTS, PARAMS)
        assert all(c.error is None for c in done)
        return _tokens(done)


# As many pages as on one device, which hold half the heads each.
SHARDED = OPTIONS | {"kv_memory": "30KB"}


@pytest.fixture(scope="module")
def runtime(wanted):
    """Two replicas, each over two devices, that have answered all prompts as one does."""
    with Runtime(tiny_llama(), mesh=make_mesh(data=2, tensor=2), **SHARDED) as rt:
        assert _tokens(rt.generate(PROMPTS, PARAMS)) == wanted
        yield rt


def test_replicas_answer_alike_under_preemption(runtime):
    """Same tokens as one, from both replicas, although their page pools are too small."""
    report, stats = runtime.report(), runtime.stats()
    assert stats.num_compilations == 0
    assert report.num_pages == 2 * (runtime.config.num_pages - 1)
    for replica in runtime._replicas.all:
        assert replica.engine.stats.num_preemptions > 0
        assert replica.engine.recorder.requests
        replica.engine.scheduler.check_integrity()
    assert stats.num_preemptions > max(
        replica.engine.stats.num_preemptions for replica in runtime._replicas.all
    )


def test_the_report_tells_replicas_apart(runtime, tmp_path):
    """A track of steps for each; the picture shows their sum."""
    runtime.generate(PROMPTS[:8], PARAMS[:8])
    report = runtime.report()
    times = [step.submitted_s for step in report.steps]
    assert times == sorted(times)
    assert max(report.figures()["pages_owned"].values()) <= report.num_pages
    report.save_trace(tmp_path / "trace.json")
    assert "pages of replica 1" in (tmp_path / "trace.json").read_text()
    assert report._repr_png_().startswith(b"\x89PNG")


def test_every_way_in_serves(runtime, wanted):
    """Streams, single requests and cancellation find the replica of their request."""
    single = runtime.generate(PROMPTS[0], SamplingParams(max_tokens=8))
    assert [single.token_ids] == wanted[0]
    streamed = [p.token_ids for p in runtime.stream(PROMPTS[0], SamplingParams(max_tokens=8))]
    assert sum(streamed, ()) == single.token_ids
    ids = [f"mine-{i}" for i in range(6)]
    params = SamplingParams(max_tokens=None)
    pending = [runtime.submit([1, 2], params, request_id=name) for name in ids]
    with pytest.raises(InvalidRequestError, match="still running"):
        for name in ids:
            runtime.submit([3], request_id=name)
    for one in pending:
        one.cancel()
    assert {one.result(60).finish_reason for one in pending} <= {"cancelled", "length"}
    again = runtime.submit([3], SamplingParams(max_tokens=2), request_id=ids[0])
    assert len(again.result(60).token_ids) == 2
    with pytest.raises(PromptTooLongError):
        runtime.generate([1] * MAX_CONTEXT)
    assert runtime._replicas._router.work == (0, 0)
    assert not runtime._replicas._placed


def test_requests_of_one_prefix_share_a_replica(runtime):
    """A conversation that resends its history is answered where it was before."""

    def counts():
        return [len(replica.engine.recorder.requests) for replica in runtime._replicas.all]

    history, before = list(range(20)), counts()
    for _ in range(3):
        done = runtime.generate(history, SamplingParams(max_tokens=3))
        history += [*done.token_ids, 7]
    more = [after - was for after, was in zip(counts(), before, strict=True)]
    assert sorted(more) == [0, 3]


def _buffers(tree) -> list[list[int]]:
    """Of each array, where its shards are, by device."""
    return [
        [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]
        for leaf in jax.tree.leaves(tree)
    ]


def _buffers_of_replicas(rt: Runtime) -> list[list[int]]:
    parts = [_buffers(replica.executor.params) for replica in rt._replicas.all]
    return [sum(shards, []) for shards in zip(*parts, strict=True)]


def test_weights_are_not_copied(wanted):
    """Replicas compute with the very buffers of data-replicated arrays, updated ones too."""
    mesh = make_mesh(data=2, tensor=2)
    model = tiny_llama()

    def placed(seed: int) -> nnx.State:
        state = nnx.state(tiny_llama(seed), nnx.Param)
        return jax.device_put(state, state_shardings(state, mesh))

    old, new = placed(0), placed(1)
    with Runtime(model, old, mesh=mesh, **SHARDED) as rt:
        assert _buffers_of_replicas(rt) == _buffers(old)
        assert _tokens(rt.generate(PROMPTS[:8], PARAMS[:8])) == wanted[:8]
        rt.update_params(new)
        assert _buffers_of_replicas(rt) == _buffers(new)
        assert _tokens(rt.generate(PROMPTS[:8], PARAMS[:8])) != wanted[:8]
        rt.update_params(nnx.state(tiny_llama(0), nnx.Param))
        assert _tokens(rt.generate(PROMPTS[:8], PARAMS[:8]))[0] == wanted[0]
        assert rt.stats().num_compilations == 0


def test_an_update_reaches_every_replica_under_load(wanted):
    """Requests from before get the old weights' answers, those from after the new ones'."""
    options = OPTIONS | {"warmup": False, "strict": False}
    with Runtime(tiny_llama(0), mesh=make_mesh(data=2), **options) as rt:
        pending = [rt.submit(p, s) for p, s in zip(PROMPTS[:8], PARAMS[:8], strict=True)]
        updates = [
            threading.Thread(target=rt.update_params, args=(nnx.state(tiny_llama(s), nnx.Param),))
            for s in (1, 1)
        ]
        for update in updates:
            update.start()
        assert _tokens(p.result(120) for p in pending) == wanted[:8]
        for update in updates:
            update.join(60)
            assert not update.is_alive()
        with Runtime(tiny_llama(1), **options) as other:
            expected = _tokens(other.generate(PROMPTS[:4], SamplingParams(max_tokens=9)))
        assert _tokens(rt.generate(PROMPTS[:4], SamplingParams(max_tokens=9))) == expected


def test_close_frees_every_replica_and_ends_its_requests():
    """No thread, page or request is left."""
    options = OPTIONS | {"warmup": False, "strict": False}
    rt = Runtime(tiny_llama(), mesh=make_mesh(data=3), **options)
    caches = jax.tree.leaves([replica.executor._cache for replica in rt._replicas.all])
    pending = [rt.submit([1, 2, 3], SamplingParams(max_tokens=None)) for _ in range(6)]
    rt.close()
    assert all(one.result(10).finish_reason in ("cancelled", "error") for one in pending)
    assert all(array.is_deleted() for array in caches)
    assert not any(replica.loop._thread.is_alive() for replica in rt._replicas.all)


def test_a_failed_replica_is_not_hidden(monkeypatch):
    """Its requests end with the error and later ones are refused; the other's end as usual."""
    options = OPTIONS | {"warmup": False, "strict": False}
    with Runtime(tiny_llama(), mesh=make_mesh(data=2), **options) as rt:

        def broken(plan):
            raise OSError("the device fell off the bus")

        monkeypatch.setattr(rt._replicas.all[1].executor, "submit", broken)
        done = rt.generate(PROMPTS[:8], SamplingParams(max_tokens=6))
        failed = [isinstance(c.error, EngineFailedError) for c in done]
        assert True in failed and False in failed
        with pytest.raises(EngineFailedError):
            for _ in range(100):  # the failure is noted a moment after its requests have ended
                rt.generate([1], SamplingParams(max_tokens=1))
                time.sleep(0.01)


def test_replica_meshes_keep_the_other_axes():
    """As many meshes as the data axis has indices, which share no device."""
    mesh = make_mesh(data=2, tensor=2)
    parts = replica_meshes(mesh)
    assert [dict(part.shape) for part in parts] == [{"data": 1, "stage": 1, "tensor": 2}] * 2
    assert np.concatenate([p.devices for p in parts]).tolist() == mesh.devices.tolist()


def test_what_has_no_whole_replicas_stays_in_one_piece():
    """Arrays on one device, on a mesh without replicas, or split over the data axis."""
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
