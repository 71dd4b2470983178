"""A model in stages has the answers of the whole model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import InvalidConfigError
from jaxserve.sharding import StagePlan, make_mesh, stages_of
from jaxserve.testing import WrapAll
from jaxserve.testing.tiny import OPTIONS, random_prompts, tiny_llama
from tests.common.tiers import some
from tests.models.hf_checkpoints import VOCAB_SIZE, write_checkpoint

NUM_LAYERS = 4
# A warm-up of stages takes many times as long as the steps that a test needs.
WARM = OPTIONS | dict(warmup="full", strict=True)
PLANS = {
    "two equal stages": StagePlan.of([2, 2]),
    "three unequal stages": StagePlan.of([1, 2, 1], micro_batches=2),
    "partial tensor parallelism": StagePlan.of([1, 1, 1, 1], tensor=[4, 2, 1, 1]),
}
# Prompts of up to 100 tokens are prefilled in chunks; the small pool preempts.
PROMPTS = random_prompts(14, longest=100)
PARAMS = [
    SamplingParams(
        max_tokens=1 + 3 * (i % 7),
        temperature=0.8 * (i % 2),
        seed=i,
        logprobs=2 * (i % 3 == 0),
        prompt_logprobs=2 if i % 10 == 0 else None,
    )
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def whole():
    """Return the answers of one device."""
    with Runtime(tiny_llama(num_layers=NUM_LAYERS), **OPTIONS) as rt:
        return rt.generate(PROMPTS, PARAMS)


def _same(got, wanted):
    assert [c.token_ids for c in got] == [c.token_ids for c in wanted]
    for mine, theirs in zip(got, wanted, strict=True):
        assert (mine.logprobs is None) == (theirs.logprobs is None)
        if mine.logprobs is not None:
            mine_, theirs_ = ([t.logprob for t in c.logprobs] for c in (mine, theirs))
            np.testing.assert_allclose(mine_, theirs_, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("plan", some(PLANS.values()), ids=PLANS.keys())
def test_stages_answer_alike(whole, plan):
    """The load is mixed, the pool is too small, and nothing compiles after a warm-up."""
    model = tiny_llama(num_layers=NUM_LAYERS)
    warm = WARM if plan is PLANS["three unequal stages"] else OPTIONS
    with Runtime(model, mesh=plan, kv_memory=_pages(plan, 22), **warm) as rt:
        got = rt.generate(PROMPTS, PARAMS)
        assert rt.stats().num_preemptions > 0
    _same(got, whole)


@pytest.mark.release
def test_stacked_layers_and_a_mesh_with_a_stage_axis(whole):
    """The layers of a scanned model are cut from their stack."""
    model = tiny_llama(num_layers=NUM_LAYERS, layer_layout="scanned")
    unrolled = tiny_llama(num_layers=NUM_LAYERS)
    blocks = [dict(nnx.to_flat_state(nnx.state(block))) for block in unrolled.blocks]
    for path, variable in nnx.to_flat_state(nnx.state(model.blocks)):
        variable[...] = jnp.stack([block[path].get_value() for block in blocks])
    for name in ("embedding", "lm_head"):
        getattr(model, name)[...] = getattr(unrolled, name)[...]
    with Runtime(model, mesh=make_mesh(stage=2, tensor=2), **OPTIONS) as rt:
        _same(rt.generate(PROMPTS, PARAMS), whole)


@pytest.mark.release
@pytest.mark.parametrize("variant", ["opt_350m", "gemma3", "qwen2_moe"])
def test_every_end_finds_its_stage(variant, tmp_path):
    """Tied embeddings, learned positions, projections, and layers that differ are on stages."""
    write_checkpoint(variant, tmp_path)
    prompts = [p.tolist() for p in np.random.default_rng(1).integers(0, VOCAB_SIZE, (2, 20))]
    params = SamplingParams(max_tokens=6)
    options = dict(**OPTIONS | dict(max_slots=2), dtype="float32", max_context=64)
    with Runtime.from_pretrained(str(tmp_path), **options) as rt:
        wanted, layers = rt.generate(prompts, params), rt.model_config.num_layers
    plan = StagePlan.of([layers - 1, 1], tensor=[1, 2])
    with Runtime.from_pretrained(str(tmp_path), mesh=plan, **options) as rt:
        _same(rt.generate(prompts, params), wanted)


@pytest.mark.release
def test_a_stage_holds_its_layers_and_no_more():
    """Parameters and pages are on the stage's devices only; a trainer's arrays are shared."""
    plan = PLANS["three unequal stages"]
    model = tiny_llama(num_layers=NUM_LAYERS)
    seen = WrapAll()
    with Runtime(model, mesh=plan, wrap_executor=seen, **OPTIONS):
        stages = seen.executors[0].stages
        for stage, part in zip(plan.stages, stages, strict=True):
            devices = set(stage.mesh.devices.flat)
            for leaf in jax.tree.leaves((part.params, part.pages.cache, part.slots.state)):
                assert leaf.sharding.device_set == devices
            assert len(part.pages.cache.k_pages) == len(stage.layers)
        mine = model.blocks[0].mlp.down[...]
        theirs = stages[0].params["blocks"][0]["mlp"]["down"].get_value()
        assert mine.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()


@pytest.mark.release
def test_new_weights_reach_every_stage(whole):
    """After an update, the answers are those of the new weights, and nothing compiles."""
    params = nnx.state(tiny_llama(num_layers=NUM_LAYERS))
    model = tiny_llama(seed=1, num_layers=NUM_LAYERS)
    with Runtime(model, mesh=PLANS["two equal stages"], **WARM) as rt:
        assert rt.generate(PROMPTS, PARAMS) != whole
        rt.update_params(params)
        _same(rt.generate(PROMPTS, PARAMS), whole)
        with pytest.raises(InvalidConfigError, match="do not fit this model"):
            rt.update_params(nnx.state(tiny_llama(num_layers=2)))


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        ([3, 0], {}, "at least 1"),
        ([3, 3], dict(tensor=[1]), "2 stages, but 1 numbers of shards"),
        ([3, 3], dict(tensor=5), "need 10 devices, but there are 8"),
        ([3, 3], dict(micro_batches=3), "power of two"),
    ],
)
def test_plans_that_cannot_be_are_refused(layers, options, message):
    """The error has the given value and a remedy."""
    with pytest.raises(ValueError, match=message):
        StagePlan.of(layers, **options)


def test_plans_that_do_not_fit_the_model_are_refused():
    """The plan is refused before the compilation."""
    with pytest.raises(InvalidConfigError, match="have 5 layers, the model has 4"):
        Runtime(tiny_llama(num_layers=NUM_LAYERS), mesh=StagePlan.of([3, 2]))
    with pytest.raises(InvalidConfigError, match=r"use one of \[1, 2, 4\]"):
        Runtime(tiny_llama(num_layers=NUM_LAYERS), mesh=StagePlan.of([2, 2], tensor=[1, 3]))
    with pytest.raises(InvalidConfigError, match="more than the model's 2 layers"):
        Runtime(tiny_llama(), mesh=make_mesh(stage=4))


def test_a_stage_axis_shares_layers_evenly():
    """The first stages have one more layer if the number is not divisible."""
    plan = stages_of(make_mesh(stage=3, tensor=2), 7)
    assert str(plan) == "3x2 + 2x2 + 2x2"
    assert plan.micro_batches == 4


def _pages(plan, num_pages):
    """Return the memory of this many pages on the stage whose pages are the largest."""
    heads = [max(2 // stage.num_shards, 1) * len(stage.layers) for stage in plan.stages]
    return num_pages * max(heads) * 8 * 8 * 4 * 2


@pytest.mark.release
def test_the_pools_of_all_stages_are_resized(whole):
    """Running requests are preempted if necessary, and have the same answers."""
    seen = WrapAll()
    options = OPTIONS | dict(max_context=128, wrap_executor=seen)
    model = tiny_llama(num_layers=NUM_LAYERS)
    with Runtime(model, mesh=PLANS["two equal stages"], **options) as rt:
        before = rt.stats().pool_bytes
        pending = [rt.submit(p, each) for p, each in zip(PROMPTS, PARAMS, strict=True)]
        rt.resize_kv(_pages(PLANS["two equal stages"], 22))
        assert rt.config.num_pages == 22
        for stage in seen.executors[0].stages:
            assert stage.pages.num_pages == 22
        _same([p.result() for p in pending], whole)
        assert rt.resize_kv(before) == before
        _same(rt.generate(PROMPTS, PARAMS), whole)
