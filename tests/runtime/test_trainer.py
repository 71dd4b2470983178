"""A trainer and the runtime share one copy of the weights, and have equal log-probabilities."""

from __future__ import annotations

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve import Runtime, SamplingParams
from jaxserve.sharding import make_mesh, state_shardings
from jaxserve.testing import WrapAll, tiny_llama
from tests.common.closeness import assert_close
from tests.common.tiers import some
from tests.runtime.serving import has_shards_of, tiny_family, weights

# Runs in its own process: peak memory since its weights were made, divided by their size.
_PEAK_GROWTH = """
import json
from pathlib import Path
import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve import Runtime, SamplingParams
from jaxserve.models.families.llama import LlamaConfig
from jaxserve.models.loading import abstract_model
from jaxserve.testing import WrapAll

def live_bytes():
    "Of arrays, each buffer once, however many of them share it."
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in jax.live_arrays()}.values())

def status_bytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

config = LlamaConfig(
    vocab_size=8192, hidden_size=2048, intermediate_size=8192, num_layers=2, num_heads=8,
    num_kv_heads=2, head_dim=64, max_position_embeddings=32,
)
graphdef, abstract = abstract_model(config)
params = jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), abstract)
model = nnx.merge(graphdef, jax.block_until_ready(params))
weights = sum(x.nbytes for x in jax.tree.leaves(params))
pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)]
live = live_bytes()
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before = status_bytes("VmHWM")
options = dict(max_slots=1, max_step_tokens=8, warmup=False, progress=False)
seen = WrapAll()
with Runtime(model, params, wrap_executor=seen, **options) as rt:
    rt.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=8))
    rt.update_params(params)
    rt.generate([1, 2, 3], SamplingParams(max_tokens=8))
    served = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(seen.executors[0].params)]
    print(json.dumps({
        "weights": weights,
        "live": live_bytes() - live,
        "resident": status_bytes("VmHWM") - before,
        "pool": rt.stats().pool_bytes,
        "shared": served == pointers,
    }))
"""


@pytest.mark.release
def test_a_runtime_holds_no_second_copy_of_the_weights():
    """This holds for its arrays and for its peak resident memory, with compiling and serving."""
    done = subprocess.run(
        [sys.executable, "-c", _PEAK_GROWTH], capture_output=True, text=True, check=True
    )
    grown = json.loads(done.stdout.splitlines()[-1])
    assert grown["shared"] and grown["weights"] > 400e6
    assert grown["live"] < grown["pool"] + 0.01 * grown["weights"]
    assert grown["resident"] < 0.5 * grown["weights"], grown


def test_every_shard_is_the_trainers():
    """On a mesh the runtime's shards are the trainer's from the start."""
    mesh = make_mesh(tensor=4)
    params = weights()
    trained = jax.device_put(params, state_shardings(params, mesh))
    seen = WrapAll()
    options = dict(max_slots=4, warmup=False, wrap_executor=seen)
    with Runtime(tiny_llama(), trained, mesh=mesh, **options):
        served = seen.executors[0].params
        assert has_shards_of(served, trained)
        assert {len(leaf.addressable_shards) for leaf in jax.tree.leaves(served)} == {4}


@pytest.mark.parametrize(
    ("family", "num_shards"),
    some([("llama", 1), ("gemma2", 4), ("qwen3_moe", 1), ("qwen3_moe", 4)]),
)
def test_log_probabilities_are_the_trainers(family, num_shards):
    """Those of greedy and sampled answers are within 1e-5 of a whole forward pass (L2, float32).

    Answers come from a mixed batch through the paged cache, by prefill chunks and decode loops.
    """
    model = tiny_family(family)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 97, length).tolist() for length in (1, 33, 5, 20)]
    each = [
        SamplingParams(temperature=i % 2, max_tokens=24, logprobs=0, seed=i)
        for i in range(len(prompts))
    ]
    mesh = None if num_shards == 1 else make_mesh(tensor=num_shards)
    options = dict(max_slots=2, max_step_tokens=16, page_size=8, warmup=False)
    with Runtime(model, mesh=mesh, **options) as rt:
        completions = rt.generate(prompts, each)
    forward = nnx.jit(lambda model, tokens: jax.nn.log_softmax(model.whole_logits(tokens)))
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = np.zeros(64, np.int32)  # padding has no effect on earlier tokens
        length = len(prompt) + len(completion.token_ids)
        tokens[:length] = [*prompt, *completion.token_ids]
        logprobs = np.asarray(forward(model, jnp.asarray(tokens)[None])[0])
        places = np.arange(len(prompt), length)
        whole = logprobs[places - 1, tokens[places]]
        served = np.array([token.logprob for token in completion.logprobs])
        assert_close(served, whole)
