"""A model over several devices has the answers of one device."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import InvalidConfigError
from jaxserve.sharding import make_mesh
from jaxserve.testing import WrapAll
from jaxserve.testing.tiny import OPTIONS, random_prompts, tiny_llama
from tests.common.tiers import some
from tests.models.hf_checkpoints import VOCAB_SIZE, torch_logits, write_checkpoint
from tests.models.serving import Server

PROMPT = np.random.default_rng(0).integers(0, VOCAB_SIZE, 37)
VARIANTS = ("llama", "qwen3", "gpt2", "opt_350m", "gptj", "gpt_neox", "gemma3", "qwen3_moe")


@pytest.mark.parametrize("variant", some(VARIANTS))
def test_two_shards_have_the_logits_of_pytorch(variant, tmp_path):
    """Every family agrees in prefill and decode, with weights read onto the shards."""
    model = write_checkpoint(variant, tmp_path)
    server = Server.from_folder(tmp_path, mesh=make_mesh(tensor=2))
    got = np.concatenate(server.step([(0, PROMPT[:36])]) + server.decode({0: PROMPT[36]}))
    wanted = torch_logits(model, PROMPT)
    assert np.linalg.norm(got - wanted) < 1e-4 * np.linalg.norm(wanted)


@pytest.fixture(scope="module")
def alone():
    """Return prompts, parameters, and the answers of one device."""
    prompts = random_prompts(12, longest=50)
    params = [
        SamplingParams(max_tokens=9, temperature=0.8 * (i % 2), seed=i, logprobs=2)
        for i in range(len(prompts))
    ]
    with Runtime(tiny_llama(num_heads=8), **OPTIONS) as rt:
        return prompts, params, rt.generate(prompts, params)


@pytest.mark.parametrize("num_shards", some([2, 4, 8]))
def test_the_engine_answers_alike(alone, num_shards):
    """Two shards have one KV head each; more shards hold copies. The pool is too small.

    Nothing compiles after a warm-up, which only one case has, since it takes long.
    """
    prompts, params, wanted = alone
    mesh, is_warm = make_mesh(tensor=num_shards), num_shards == 4
    options = OPTIONS | dict(warmup=is_warm, strict=is_warm, kv_memory=18 * 1024)
    with Runtime(tiny_llama(num_heads=8), mesh=mesh, **options) as rt:
        got = rt.generate(prompts, params)
        assert rt.config.num_pages == 18 and rt.stats().num_preemptions > 0
    assert [c.token_ids for c in got] == [c.token_ids for c in wanted]


def test_weights_and_pages_are_split():
    """A shard holds only its part of both."""
    mesh, seen = make_mesh(tensor=2), WrapAll()
    options = OPTIONS | dict(wrap_executor=seen)
    with Runtime(tiny_llama(), mesh=mesh, **options) as rt:
        cache = seen.executors[0].pages.cache
        pages = cache.k_pages[0]
        assert pages.sharding.shard_shape(pages.shape)[2] == 1
        everything = sum(x.nbytes for x in jax.tree.leaves(cache))
        assert everything == 2 * rt.stats().pool_bytes


@pytest.mark.parametrize(
    ("num_shards", "message"), [(3, r"use one of \[1, 2, 4\]"), (8, r"use one of \[1, 2, 4\]")]
)
def test_a_mesh_that_does_not_fit_is_refused(num_shards, message):
    """The mesh is refused before the compilation, with the sizes that fit."""
    with pytest.raises(InvalidConfigError, match=message):
        Runtime(tiny_llama(), mesh=make_mesh(tensor=num_shards))
