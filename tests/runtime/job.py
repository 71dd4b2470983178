"""The program of a test job's processes: `python -m tests.runtime.job rounds|forever|differ`."""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
from flax import nnx

from jaxserve import JaxserveError, Runtime, SamplingParams
from jaxserve.models.families.llama import Llama, LlamaConfig
from jaxserve.models.loading import abstract_model
from jaxserve.testing.tiny import MAX_CONTEXT, VOCAB_SIZE, random_prompts
from sharding import JoinError, join, make_mesh

OPTIONS = dict(max_slots=2, max_step_tokens=32, page_size=8, progress=False)
PROMPTS = random_prompts(8, longest=50)
PARAMS = [
    SamplingParams(max_tokens=9, temperature=0.8 * (i % 2), seed=i, logprobs=2)
    for i in range(len(PROMPTS))
]
WEIGHT_SEEDS = (0, 1)
CONFIG = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=MAX_CONTEXT,
)


def params(seed: int) -> nnx.State:
    """Return weights from NumPy: drawing them on a device would compile in every process."""
    rng = np.random.default_rng(seed)
    _, state = abstract_model(CONFIG)
    return jax.tree.map(lambda x: jax.numpy.asarray(rng.normal(0, 0.4, x.shape), x.dtype), state)


def model() -> Llama:
    """Return a decoder with the first weights."""
    graphdef, _ = abstract_model(CONFIG)
    return nnx.merge(graphdef, params(WEIGHT_SEEDS[0]))


def rounds(rt: Runtime) -> None:
    """Print the tokens of a round of answers with each of several weights."""
    for seed in WEIGHT_SEEDS:
        rt.update_params(params(seed))
        if rt.is_leader:
            answers = rt.generate(PROMPTS, PARAMS)
            print(json.dumps([c.token_ids for c in answers]), flush=True)
            rt.dismiss_followers()
        else:
            rt.follow()


def refused(rt: Runtime) -> None:
    """Print the error of a follower that is asked for an answer."""
    try:
        rt.generate(PROMPTS[0])
    except JaxserveError as error:
        print(type(error).__name__, error, file=sys.stderr)


def main(what: str) -> None:
    group = join()
    process_id = 0 if group is None else group.process_id
    options = OPTIONS | (dict(max_slots=2 + process_id) if what == "differ" else {})
    # A warm-up takes many times as long as the answers.
    options |= dict(strict=True) if what == "rounds" else dict(warmup=False)
    mesh = make_mesh(tensor=jax.device_count())
    with Runtime(model(), mesh=mesh, **options) as rt:
        rounds(rt)
        if not rt.is_leader:
            refused(rt)
            rt.follow()
        while what == "forever":
            rt.generate(PROMPTS, PARAMS)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except (JaxserveError, JoinError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
