"""A request has the same bits in any batch, however it is computed, and for the trainer too."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import (
    InvalidConfigError,
    InvalidRequestError,
    InvalidSamplingParamsError,
    PromptTooLongError,
)
from jaxserve.runtime import whole_processed_logprobs
from jaxserve.sharding import StagePlan, make_groups, make_mesh
from jaxserve.testing import OPTIONS, random_prompts, tiny_llama
from tests.common.tiers import some
from tests.runtime.serving import bits_of

ON = OPTIONS | {"deterministic": True}
# Two pairs of prompts begin alike, for the prefix cache.
SHARED = random_prompts(1, seed=9, longest=40)[0] * 3
PROMPTS = [*random_prompts(10, seed=4), SHARED[:37], SHARED[:41]]
PARAMS = [
    SamplingParams(
        max_tokens=3 + 2 * i,
        temperature=0.7 * (i % 3 > 0),
        top_p=0.9 if i % 4 == 1 else 1.0,
        top_k=20 if i % 4 == 2 else 0,
        repetition_penalty=1.2 if i % 5 == 4 else 1.0,
        seed=i,
        logprobs=2,
    )
    for i in range(len(PROMPTS))
]


own_bits = partial(bits_of, PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def alone() -> dict[int, Any]:
    """Each request by itself, without a prefix cache."""
    with Runtime(tiny_llama(), **ON | {"policy": "vllm_like"}) as rt:
        return {i: own_bits(rt, [i])[i] for i in range(len(PROMPTS))}


def test_batches_and_cached_prefixes_change_nothing(alone):
    """Any requests are together, in any order, and some find their prompts in the cache."""
    rng = random.Random(0)
    with Runtime(tiny_llama(), **ON | {"policy": "pensieve"}) as rt:
        for _ in range(8):
            chosen = rng.sample(range(len(PROMPTS)), rng.randint(2, len(PROMPTS)))
            assert own_bits(rt, chosen) == {i: alone[i] for i in chosen}
        assert rt.stats().num_prefix_hit > 0


@pytest.mark.release
@pytest.mark.parametrize(
    "options",
    some(
        [
            dict(max_step_tokens=16, max_slots=3, page_size=4, max_decode_iterations=1),
            dict(policy="pensieve", kv_memory="40kB", restore="both"),
            dict(policy="vllm_like", kv_memory="40kB", host_memory=0),
            dict(speculation="lookup"),
        ],
        1,
    ),
    ids=["chunks", "restored", "recomputed", "speculating"],
)
def test_how_a_request_is_computed_changes_nothing(alone, options):
    """Small chunks and pages, and preempted sequences that are restored or computed again."""
    with Runtime(tiny_llama(), **ON | options) as rt:
        assert own_bits(rt, range(len(PROMPTS))) == alone
        assert "kv_memory" not in options or rt.stats().num_preemptions > 0


@pytest.mark.release
@pytest.mark.parametrize(
    "options",
    some(
        [
            dict(mesh=lambda: make_groups(encode=1, decode=1), policy="exegpt_waa_c"),
            dict(mesh=lambda: StagePlan.of([1, 1])),
            dict(mesh=lambda: make_mesh(data=2)),
        ],
        1,
    ),
    ids=["groups", "stages", "replicas"],
)
def test_where_a_request_is_computed_changes_nothing(alone, options):
    """Prompts and answers on separate devices, layers on separate devices, and replicas."""
    options = options | {"mesh": options["mesh"]()}
    with Runtime(tiny_llama(), **ON | options) as rt:
        assert own_bits(rt, range(len(PROMPTS))) == alone


def disagreements(model: Any) -> list[str]:
    """Return where scores, or the trainer's log-probabilities, differ from what sampling reported.

    They are "score", "processed" and "whole" with the number of the request.
    """
    with Runtime(model, **ON) as rt:
        done = rt.generate(PROMPTS, PARAMS, progress=False)
        sequences = [[*p, *each.token_ids] for p, each in zip(PROMPTS, done, strict=True)]
        scores = rt.score(sequences)
        # Drawn with top-p, with top-k, with a penalty, and with a temperature alone.
        processed = {i: rt.score(sequences[i], PARAMS[i]) for i in (1, 2, 4, 7)}
    logprobs = nnx.jit(lambda model, tokens: model.whole_logprobs(tokens))
    found = []
    for i, (each, tokens) in enumerate(zip(done, sequences, strict=True)):
        answer = slice(len(PROMPTS[i]) - 1, None)
        padded = np.zeros((1, 128), np.int32)  # padding has no effect on earlier tokens
        padded[0, : len(tokens)] = tokens
        whole = np.asarray(logprobs(model, jnp.asarray(padded)))[0, : len(tokens) - 1]
        reported = np.array([token.logprob for token in each.logprobs], np.float32)
        pairs = {"whole": (whole, scores[i]), "score": (scores[i][answer], reported)}
        if i in processed:
            after = np.array([token.processed_logprob for token in each.logprobs], np.float32)
            assert np.any(after != reported)
            pairs["processed"] = processed[i][answer], after
        found += [f"{name} {i}" for name, pair in pairs.items() if not np.array_equal(*pair)]
    return found


@pytest.mark.release
def test_scores_and_the_trainer_have_the_bits_that_sampling_reports():
    """`rt.score` and `whole_logprobs` give the log-probabilities of greedy and drawn tokens."""
    assert disagreements(tiny_llama()) == []


@pytest.mark.release
@pytest.mark.parametrize(
    "params", some([PARAMS[1], PARAMS[2], PARAMS[4]]), ids=["p", "k", "penalty"]
)
def test_the_trainer_has_the_bits_after_truncation_too(params):
    """`whole_processed_logprobs` has them within a training step, whose gradient is as expected."""
    prompt = PROMPTS[0]
    with Runtime(tiny_llama(), **ON) as rt:
        (done,) = rt.generate([prompt], replace(params, max_tokens=20))
    reported = np.array([token.processed_logprob for token in done.logprobs], np.float32)
    answer = slice(len(prompt) - 1, len(prompt) + len(done.token_ids) - 1)
    tokens = np.zeros((1, 128), np.int32)
    tokens[0, : answer.stop + 1] = [*prompt, *done.token_ids]
    graphdef, state = nnx.split(tiny_llama())

    def objective(state: nnx.State) -> Any:
        model = nnx.merge(graphdef, state)
        found = whole_processed_logprobs(model, jnp.asarray(tokens), params)[0, answer]
        return jnp.sum(found), found

    alone = whole_processed_logprobs(tiny_llama(), jnp.asarray(tokens[:, :1]), params)
    assert alone.shape == (1, 0)
    step = jax.jit(jax.value_and_grad(objective, has_aux=True))
    (_, found), gradient = step(state)
    np.testing.assert_array_equal(found, reported)
    norm = float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradient))))

    def value_at(distance: float) -> float:
        moved = jax.tree.map(lambda p, g: p + distance / norm * g, state, gradient)
        return float(step(moved)[0][0])

    slope = (value_at(1e-3) - value_at(-1e-3)) / 2e-3
    np.testing.assert_allclose(slope, norm, rtol=0.02)


@pytest.mark.release
def test_parameters_that_a_trainer_cannot_follow_are_refused():
    """As `Runtime.score` does, and adapters, which are not in the model."""
    tokens = jnp.zeros((1, 3), jnp.int32)
    for params, message in (
        (SamplingParams(), "temperature=0"),
        (SamplingParams(temperature=1.0, adapter="a"), "merge it into the weights"),
    ):
        with pytest.raises(InvalidSamplingParamsError, match=message):
            whole_processed_logprobs(tiny_llama(), tokens, params)


def test_a_sequence_that_cannot_be_scored_is_named():
    """A sequence as long as the context is refused; one token has no scores."""
    with Runtime(tiny_llama(), **ON) as rt:
        with pytest.raises(PromptTooLongError, match="128 tokens"):
            rt.score([[1, 2], [1] * 128])
        assert rt.score([5]).shape == (0,)
        np.testing.assert_array_equal(rt.score([5, 6, 7]), rt.score([[5, 6, 7]])[0])
        for params, message in (
            (SamplingParams(), "temperature=0"),
            (SamplingParams(temperature=1.0, presence_penalty=0.5), "presence_penalty=0.5"),
            (SamplingParams(temperature=1.0, regex="a*"), "a grammar"),
        ):
            with pytest.raises(InvalidSamplingParamsError, match=message):
                rt.score([1, 2], params)


def test_a_sequence_that_is_cancelled_is_an_error():
    """An update or a pause with running="abort" ends the call with an error, not with scores."""
    with Runtime(tiny_llama(), **ON) as rt, ThreadPoolExecutor(1) as thread:
        rt.pause()
        waiting = thread.submit(rt.score, [1, 2, 3])
        for _ in range(1000):
            rt.pause("abort")
            if waiting.done():
                break
            time.sleep(0.01)
        rt.resume()
        with pytest.raises(InvalidRequestError, match="cancelled before it was scored"):
            waiting.result(30)
        assert rt.score([1, 2, 3]).shape == (2,)


# The tests of this process compile without optimisation. XLA vectorises what it optimises, so that
# the order of a sum may depend on the number of rows.
_OPTIMISED = """
import json, sys
from jaxserve import Runtime
from tests.runtime import test_deterministic as tests
from tests.runtime.serving import tiny_family

found = []
for family in ("qwen3_moe", "gpt_neox"):
    model = tiny_family(family)
    found += [f"{family} {each}" for each in tests.disagreements(model)]
    with Runtime(model, **tests.ON) as rt:
        whole = tests.own_bits(rt, range(len(tests.PROMPTS)))
        for some in ([3], [1, 6, 8, 2], [11, 0, 5, 7, 4, 9, 10]):
            for i, bits in tests.own_bits(rt, some).items():
                found += [] if bits == whole[i] else [f"{family} {i} of {some}"]
json.dump(found, sys.stdout)
"""


@pytest.mark.release
def test_code_that_xla_optimises_gives_the_same_bits():
    """Norms, experts and log-probabilities do, in batches of other sizes, scores and training."""
    environment = {name: v for name, v in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", _OPTIMISED], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(mesh=lambda: make_mesh(tensor=2)), "tensor=2: pass a mesh without a tensor axis"),
        (dict(attention="xla"), "attention='xla': omit it"),
        (dict(quantize="fp8"), "float8: pass quantize='int8' or 'int4'"),
        (dict(dtype=jnp.bfloat16), "in bfloat16: pass dtype='float32'"),
    ],
)
def test_what_cannot_be_promised_is_refused(options, message):
    made = {name: value() if name == "mesh" else value for name, value in options.items()}
    model = tiny_llama(dtype=made.pop("dtype", jnp.float32))
    with pytest.raises(InvalidConfigError, match=message):
        Runtime(model, **ON | made)


@pytest.mark.release
def test_weights_in_few_bits_are_deterministic():
    with Runtime(tiny_llama(), **ON | {"quantize": "int8"}) as rt:
        whole = own_bits(rt, range(len(PROMPTS)))
        assert own_bits(rt, [2, 7]) == {i: whole[i] for i in (2, 7)}
