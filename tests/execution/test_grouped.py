"""Prompts and answers on groups of real devices: the answers of one device, whatever happens."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from functools import partial

import jax
import pytest
from flax import nnx

from jaxserve import Runtime, SamplingParams
from jaxserve.core.clock import WallClock
from jaxserve.core.errors import (
    EngineFailedError,
    InfeasibleBoundError,
    InvalidConfigError,
    StepMemoryError,
)
from jaxserve.core.request import Request
from jaxserve.engine.engine import Engine
from jaxserve.scheduling.admission import OnDemand
from jaxserve.scheduling.iteration.waa import WAA
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.presets import PRESETS
from jaxserve.sharding import DeviceGroups, Stage, StagePlan, make_groups, make_mesh
from jaxserve.steps.heads import Chosen
from jaxserve.testing import ExecutorWrapper, FaultyExecutor, SlowExecutor, WrapAll
from jaxserve.testing.tiny import OPTIONS, random_prompts, tiny_llama
from tests.common.tiers import some
from tests.models.t5_checkpoints import random_prompts as t5_prompts
from tests.models.t5_checkpoints import write_checkpoint

NUM_LAYERS = 3
# Pages on demand, so that a small pool preempts; several iterations of a decode step.
POLICY = replace(
    PRESETS["exegpt_waa_c"],
    name="waa on demand",
    admission=OnDemand(0.0),
    iteration=WAA(encode_batch=4, decode_iterations=2),
)
PROMPTS = random_prompts(12, longest=60)
PARAMS = [
    SamplingParams(
        max_tokens=1 + 5 * (i % 5),
        temperature=0.8 * (i % 2),
        seed=i,
        n=1 + (i % 4 == 3),
        logprobs=2 * (i % 3 == 0),
    )
    for i in range(len(PROMPTS))
]


def _model(**settings):
    return tiny_llama(num_layers=NUM_LAYERS, num_heads=8, **settings)


def _groups() -> dict[str, DeviceGroups]:
    devices = jax.devices()
    return {
        "a device each": make_groups(encode=1, decode=1),
        "copies of KV heads": make_groups(encode=2, decode=4),
        "fewer shards": make_groups(encode=4, decode=1),
        "stages of other layers": DeviceGroups(
            StagePlan.of([1, 2], devices=devices),
            StagePlan.of([2, 1], tensor=[4, 1], devices=devices[2:]),
        ),
    }


@pytest.fixture(scope="module")
def wanted():
    """Return the answers of one device under the default policy."""
    with Runtime(_model(), **OPTIONS) as rt:
        return _samples(rt.generate(PROMPTS, PARAMS))


def _samples(completions):
    return [[s.token_ids for s in completion.samples] for completion in completions]


def _memory(groups: DeviceGroups, num_pages: int) -> int:
    """Return the memory of this many pages on the device whose pages are the largest."""

    def per_layer(num_shards: int) -> int:
        return max(2 // num_shards, 1) * 8 * 8 * 4 * 2

    sizes = [
        len(stage.layers) * per_layer(stage.num_shards)
        for group in groups.both
        for stage in (
            group.stages if isinstance(group, StagePlan) else [Stage(group, range(NUM_LAYERS))]
        )
    ]
    return num_pages * max(sizes)


@pytest.mark.parametrize("groups", some(_groups().values()), ids=_groups().keys())
def test_groups_answer_alike(wanted, groups):
    """Greedy and sampled, one sample and two, in a pool that preempts; nothing compiles if warm."""
    memory = _memory(groups, 12)
    # A warm-up takes many times as long as the steps that are needed.
    is_warm = isinstance(groups.encode, StagePlan)
    options = OPTIONS | dict(policy=POLICY, strict=is_warm, warmup=is_warm, kv_memory=memory)
    with Runtime(_model(), mesh=groups, **options) as rt:
        assert rt.config.num_pages == 12 and rt.stats().pool_bytes == memory
        assert _samples(rt.generate(PROMPTS, PARAMS)) == wanted
        rt.check_integrity()
        stats = rt.stats()
    assert stats.num_preemptions > 0 and stats.num_pages_handed_over > 0


SMALL = OPTIONS | dict(policy=POLICY)
ONE_EACH = make_groups(encode=1, decode=1)


@pytest.mark.release
def test_pages_of_eight_bits_and_their_scales():
    """Their KV heads go from four shards to two, in a scanned model, as they are on one device."""
    model = _model(layer_layout="scanned")
    options = OPTIONS | dict(kv_dtype="int8")
    with Runtime(model, **options) as rt:
        wanted = _samples(rt.generate(PROMPTS, PARAMS))
    groups = make_groups(encode=4, decode=2)
    with Runtime(model, mesh=groups, policy=POLICY, **options) as rt:
        assert _samples(rt.generate(PROMPTS, PARAMS)) == wanted


@pytest.mark.release
def test_requests_go_on_while_weights_pages_and_others_change(wanted):
    """Cancellations, another pool, other weights and other batch sizes, without a compilation."""
    seen = WrapAll(partial(SlowExecutor, step_s=0.0))
    options = SMALL | dict(strict=True, warmup=True, wrap_executor=seen, mesh=ONE_EACH)
    with Runtime(_model(), **options) as rt:
        (slow,) = seen.executors
        before = rt.stats().pool_bytes
        slow.step_s = 0.01
        pending = [rt.submit(p, each) for p, each in zip(PROMPTS, PARAMS, strict=True)]
        for each in pending[1::3]:
            rt.cancel(each.request_id)
        rt.resize_kv(_memory(ONE_EACH, 14))
        assert [group.config.num_pages for group in slow.groups] == [14, 14]
        slow.step_s = 0.0
        found = [each.result() for each in pending]
        for index in set(range(len(PROMPTS))) - set(range(1, len(PROMPTS), 3)):
            assert _samples([found[index]]) == [wanted[index]]
        rt.check_integrity()
        assert rt.resize_kv(before) == before

        rt.update_params(nnx.state(_model(seed=1)))
        assert _samples(rt.generate(PROMPTS, PARAMS)) != wanted
        rt.update_params(nnx.state(_model()))
        assert _samples(rt.generate(PROMPTS, PARAMS)) == wanted
        with pytest.raises(InvalidConfigError, match="do not fit this model"):
            rt.update_params(nnx.state(tiny_llama(num_layers=2)))

        engine = Engine(slow, POLICY, WallClock())
        sequences = [s for each in _requests() for s in engine.add(each)]
        for size in (1, 3):
            for _ in range(8):
                engine.step()
            engine.adopt(WAA(encode_batch=size))
        while engine.has_work:
            engine.step()
        assert [tuple(s.output) for s in sequences] == [w for samples in wanted for w in samples]


def _requests():
    return [
        Request(id=str(i), prompt=prompt, params=params, arrival_s=0.0, seed=params.seed or 0)
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]


@pytest.mark.release
def test_pages_that_do_not_arrive_are_computed_anew(wanted):
    """The link loses every third plan; answers are the same, and no page is leaked."""
    faulty = partial(FaultyExecutor, loses_every=3)
    with Runtime(_model(), mesh=ONE_EACH, wrap_executor=faulty, **SMALL) as rt:
        assert _samples(rt.generate(PROMPTS, PARAMS)) == wanted
        assert rt.stats().num_handovers_lost > 0
        rt.check_integrity()


@pytest.mark.release
def test_groups_go_on_after_steps_without_memory(wanted):
    """Requests of those steps fail; the others are computed anew, and so are pages on their way."""
    faulty = partial(FaultyExecutor, out_of_memory_every=9)
    with Runtime(_model(), mesh=ONE_EACH, wrap_executor=faulty, **SMALL) as rt:
        done = rt.generate(PROMPTS, PARAMS)
        assert rt.stats().num_lost_steps > 0
        assert any(isinstance(each.error, StepMemoryError) for each in done)
        for each, samples in zip(done, wanted, strict=True):
            assert each.error is not None or _samples([each]) == [samples]
        rt.check_integrity()


class EncodeGroupDies(ExecutorWrapper):
    """The encode group's devices fail when the first pages are handed over."""

    def submit(self, plan: StepPlan):
        if plan.handovers:
            (pool,) = self.inner.groups[0].page_pools
            pool.replace(jax.jit(_failing)(pool.cache))
        return self.inner.submit(plan)


def _failing(cache):
    def fail(leaf):
        raise RuntimeError("the device fell off the bus")

    return jax.tree.map(lambda leaf: jax.pure_callback(fail, leaf, leaf), cache)


def test_a_group_that_dies_fails_every_request_with_a_typed_error():
    """Nothing hangs: what has not ended fails, and so do later requests; the runtime closes."""
    with Runtime(_model(), mesh=ONE_EACH, wrap_executor=EncodeGroupDies, **SMALL) as rt:
        pending = [rt.submit(p, each) for p, each in zip(PROMPTS, PARAMS, strict=True)]
        errors = [each.result().error for each in pending]
        assert sum(error is not None for error in errors) > len(PROMPTS) // 2
        for error in filter(None, errors):
            assert isinstance(error, EngineFailedError) and "fell off the bus" in str(error)
        with pytest.raises(EngineFailedError, match="fell off the bus"):
            rt.submit(PROMPTS[0], PARAMS[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(policy="exegpt_waa_c"), "this mesh is one group; pass mesh=sharding.make_groups"),
        (dict(policy="exegpt_waa_c", mesh=make_mesh(tensor=2)), "this mesh is one group"),
        (dict(policy="auto", mesh=ONE_EACH), r"policy='auto' plans for one.*exegpt_waa_c"),
        (
            dict(policy="exegpt_waa_c", mesh=ONE_EACH, disk_memory="1MiB"),
            "keeps no pages on the host",
        ),
        (
            dict(policy="exegpt_waa_c", mesh=make_groups(encode=1, decode=3)),
            r"use one of \[1, 2, 4, 8\]",
        ),
    ],
    ids=str,
)
def test_meshes_and_policies_that_do_not_fit_are_refused(options, message):
    """The error comes before the compilation and has a remedy."""
    with pytest.raises(InvalidConfigError, match=message):
        Runtime(_model(), **options)


@pytest.mark.release
def test_a_plan_is_found_and_adopted_while_requests_run(wanted):
    """It is a WAA schedule from measured times; a table of one group's times is refused."""
    with Runtime(_model(), mesh=ONE_EACH, **SMALL) as rt:
        with pytest.raises(InvalidConfigError, match="this runtime has two; call measure_group_"):
            rt.measure_step_times()
        times = rt.measure_group_times(rounds=1)
        assert [each.origin.device["count"] for each in times.groups] == [1, 1]
        assert times.page_s >= 0 and times.costs().handover_s >= 0
        pending = [rt.submit(p, each) for p, each in zip(PROMPTS, PARAMS, strict=True)]
        plan = rt.plan(math.inf, lengths=[(len(prompt), 10) for prompt in PROMPTS])
        assert plan.family == "waa" and plan.answers_per_s > 0 and "WAA: encode" in str(plan)
        assert _samples([each.result() for each in pending]) == wanted
        with pytest.raises(InfeasibleBoundError):
            rt.plan(1e-9)
        assert _samples(rt.generate(PROMPTS, PARAMS)) == wanted
        rt.check_integrity()


@pytest.mark.release
def test_an_encoder_decoder_model_is_handed_over(tmp_path):
    """The keys of the encoder are copied too; both groups have stages or shards of their own."""
    write_checkpoint("t5", tmp_path)
    prompts = t5_prompts(5)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    options = OPTIONS | dict(max_context=128, max_step_tokens=64, dtype="float32")
    with Runtime.from_pretrained(str(tmp_path), **options) as rt:
        wanted = _samples(rt.generate(prompts, params))
        num_layers = rt.model_config.num_layers
    groups = DeviceGroups(
        make_mesh(tensor=2),
        StagePlan.of([1, num_layers - 1], devices=jax.devices()[2:]),
    )
    with Runtime.from_pretrained(str(tmp_path), mesh=groups, policy=POLICY, **options) as rt:
        assert _samples(rt.generate(prompts, params)) == wanted
        assert [each.shape for each in rt.encode(prompts)] == [
            (len(prompt), rt.model_config.hidden_size) for prompt in prompts
        ]


@pytest.mark.release
def test_tokens_in_transit_to_released_slots_are_dropped():
    """Those of an encode group's stages, whose sequences are handed over after one token each."""
    first, second = jax.devices()[:2], jax.devices()[2:4]
    mesh = DeviceGroups(StagePlan.of([1, 1], devices=first), StagePlan.of([1, 1], devices=second))
    with Runtime(tiny_llama(), mesh=mesh, policy="exegpt_waa_c", **OPTIONS) as rt:
        for _ in range(2):
            rt.generate([[i, 5, 7] for i in range(48)], SamplingParams(max_tokens=3))
        gc.collect()
        assert sum(type(each) is Chosen for each in gc.get_objects()) < 12
