"""Weights that change while requests run: versions, KV, pages, staleness and updates that fail."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import (
    EngineBusyError,
    InvalidConfigError,
    InvalidParamsError,
    StaleWeightsError,
)
from jaxserve.core.request import Completion
from jaxserve.engine.answers import Weights
from jaxserve.runtime.weight_update import WeightUpdate
from jaxserve.sharding import StagePlan, make_mesh, state_shardings
from jaxserve.testing import SlowExecutor, tiny
from jaxserve.testing.tiny import MAX_CONTEXT, VOCAB_SIZE, tiny_llama
from tests.common.tiers import some
from tests.runtime.serving import weights

OPTIONS: dict[str, Any] = tiny.OPTIONS | {"policy": "auto", "strict": True, "warmup": True}
SLOW: dict[str, Any] = OPTIONS | {
    "wrap_executor": partial(SlowExecutor, step_s=0.02),
    "max_decode_iterations": 4,
}
PROMPT = tuple(np.random.default_rng(3).integers(0, VOCAB_SIZE, 24).tolist())
LONG = SamplingParams(max_tokens=90)
NUM_SETS = 4
NUM_UPDATES = 1000


@pytest.fixture(scope="module")
def slow():
    """A runtime whose steps take 20 ms longer, and give four tokens to a sequence at most."""
    for seed in range(3):
        weights(seed)  # so that no request ends while they are made
    with Runtime(tiny_llama(0), **SLOW) as rt:
        yield rt


def _begun(rt: Runtime, params: SamplingParams = LONG):
    """Submit the prompt, and return it in the middle of its answer with the tokens so far."""
    pieces = []
    pending = rt.submit(PROMPT, params, on_piece=pieces.append)
    while not pieces:
        time.sleep(0.001)
    return pending, pieces


def _live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def _greedy(seed: int, tokens: Sequence[int]) -> list[int]:
    """Return the greedy token after each token, by a forward pass over all of them."""
    padded = np.zeros(MAX_CONTEXT, np.int32)
    padded[: len(tokens)] = tokens
    logits = np.asarray(_logits(weights(seed), jnp.asarray(padded)[None]))[0]
    return np.argmax(logits, -1)[: len(tokens)].tolist()


@jax.jit
def _logits(params: nnx.State, tokens: jax.Array) -> jax.Array:
    return nnx.merge(nnx.graphdef(tiny_llama()), params).whole_logits(tokens)


@jax.jit
def _gaps(params: nnx.State, tokens: jax.Array) -> jax.Array:
    """Return by how much each token's logit is below the greedy one, [rows, tokens - 1]."""
    logits = _logits(params, tokens)[:, :-1]
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], 2)[..., 0]
    return logits.max(-1) - chosen


def _check_tokens(done: Sequence[Completion], sets: Sequence[nnx.State]) -> None:
    """Check that each token is the greedy one of the weights of its version, and of no others."""
    length = max(len(c.prompt_token_ids) + len(c.token_ids) for c in done)
    contexts = np.zeros((len(done), length), np.int32)
    for row, completion in enumerate(done):
        tokens = [*completion.prompt_token_ids, *completion.token_ids]
        contexts[row, : len(tokens)] = tokens
    gaps = np.stack([_gaps(params, jnp.asarray(contexts)) for params in sets])
    right, wrong = [], []
    for row, completion in enumerate(done):
        start = len(completion.prompt_token_ids) - 1
        for place, version in enumerate(completion.weights_versions, start):
            right.append(gaps[version % NUM_SETS, row, place])
            wrong.append(gaps[(version + 1) % NUM_SETS, row, place])
    assert len(right) > NUM_UPDATES // 2 and np.max(right) < 1e-3
    assert np.mean(np.array(wrong) < 1e-3) < 0.2  # so that another version would be noticed


@pytest.mark.release
def test_a_thousand_updates_while_requests_run():
    """Every token is of its version's weights; nothing compiles, and memory does not grow.

    Prompts share their first two pages, so a page of former weights would change tokens.
    """
    sets = [weights(seed) for seed in range(NUM_SETS)]
    rng = np.random.default_rng(0)
    common = rng.integers(0, VOCAB_SIZE, 16).tolist()
    each = SamplingParams(max_tokens=12)
    with Runtime(tiny_llama(0), **OPTIONS) as rt:
        rt.update_params(sets[1])  # compiles the check for NaN
        pending, versions, live = [], [], {}
        compiled = rt.stats().num_compilations
        for version in range(2, NUM_UPDATES + 2):
            while sum(not one.future.done() for one in pending[-20:]) < 6:
                prompt = [*common, *rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 9))).tolist()]
                pending.append(rt.submit(prompt, each))
                versions.append(rt.weights_version)
            assert rt.update_params(sets[version % NUM_SETS], running="keep") == version
            if version in (NUM_UPDATES // 2, NUM_UPDATES):
                rt.pause()  # arrays of steps in flight come and go
                live[version] = _live_bytes()
                rt.resume()
        done = [one.result(60) for one in pending]
        rt.check_integrity()
        assert rt.stats().num_compilations == compiled
        assert rt.stats().num_prefix_hit > 0
    set_bytes = sum(array.nbytes for array in jax.tree.leaves(sets[0]))
    assert live[NUM_UPDATES] - live[NUM_UPDATES // 2] < set_bytes
    assert sum(len(c.samples[0].version_runs) > 1 for c in done) > len(done) // 2
    for completion, submitted in zip(done, versions, strict=True):
        found = completion.weights_versions
        assert len(found) == len(completion.token_ids) == 12
        assert list(found) == sorted(found) and submitted <= found[0] == completion.weights_version
    _check_tokens(done, sets)


@pytest.mark.release
def test_scores_of_a_prompt_stay_those_that_its_answer_began_with(slow):
    """Computing the prompt anew for other weights does not exchange them under the first tokens."""
    asked = SamplingParams(max_tokens=90, prompt_logprobs=0)
    slow.update_params(weights(0))
    pending, _ = _begun(slow, asked)
    slow.update_params(weights(1), running="keep", kv="recompute")
    done = pending.result(60)
    assert len(done.samples[0].version_runs) == 2
    found = {}
    for seed in (0, 1):
        slow.update_params(weights(seed))
        [alone] = slow.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=0))
        found[seed] = _scores(alone)
    np.testing.assert_allclose(_scores(done), found[0], rtol=1e-4)
    assert not np.allclose(found[0], found[1], rtol=1e-2)


def _scores(completion: Completion) -> list[float]:
    return [token.logprob for token in completion.prompt_logprobs or () if token is not None]


@pytest.mark.release
def test_kept_kv_goes_on_at_once_and_is_not_found_by_others(slow):
    """The next token is of the new weights; no later prompt gets pages of the old ones."""
    before = slow.weights_version
    slow.update_params(weights(0))
    pending, _ = _begun(slow)
    num_recomputed = slow.stats().num_prefix_queried
    slow.update_params(weights(1), running="keep", kv="keep")
    mixed = pending.result(60)
    assert slow.stats().num_prefix_queried == num_recomputed  # it was not admitted again
    [(old, num_old), (new, num_new)] = mixed.samples[0].version_runs
    assert (old, new) == (before + 1, before + 2) and num_old + num_new == LONG.max_tokens
    greedy = _greedy(0, [*PROMPT, *mixed.token_ids])
    assert list(mixed.token_ids[:num_old]) == greedy[len(PROMPT) - 1 :][:num_old]
    follow_up = [*PROMPT, *mixed.token_ids[:30]]
    hits = slow.stats().num_prefix_hit
    again = slow.generate(follow_up, SamplingParams(max_tokens=20))
    assert slow.stats().num_prefix_hit == hits
    context = [*follow_up, *again.token_ids]
    assert list(again.token_ids) == _greedy(1, context)[len(follow_up) - 1 : -1]
    slow.check_integrity()


def test_pieces_and_samples_have_versions(slow):
    """A stream says the version of each piece; two samples of a request have their own runs."""
    slow.update_params(weights(0))
    first = slow.weights_version
    several = SamplingParams(max_tokens=40, n=2, temperature=1.0, seed=1)
    pending, pieces = _begun(slow, several)
    slow.update_params(weights(1), running="keep")
    done = pending.result(60)
    for index, sample in enumerate(done.samples):
        own = [(p.weights_version, len(p.token_ids)) for p in pieces if p.sample_index == index]
        by_piece = [version for version, count in own for _ in range(count)]
        assert by_piece == list(sample.weights_versions)
    assert done.weights_version == first and done.samples[0].weights_versions[-1] == first + 1


@pytest.mark.release
def test_a_sample_that_is_too_stale_ends(slow):
    """It keeps its tokens and has a typed error; one whose first token is new enough goes on."""
    slow.update_params(weights(0))
    stale, _ = _begun(slow)
    slow.update_params(weights(1), running="keep", max_staleness=1)
    fresh, _ = _begun(slow)
    slow.update_params(weights(2), running="keep", max_staleness=1)
    ended = stale.result(60)
    assert isinstance(ended.error, StaleWeightsError) and ended.finish_reason == "error"
    assert 0 < len(ended.token_ids) < LONG.max_tokens
    assert len(ended.weights_versions) == len(ended.token_ids)
    assert fresh.result(60).finish_reason == "length"


@pytest.mark.release
def test_versions_are_given_or_counted(slow):
    """A given one is above the present one; other arguments are checked before requests end."""
    present = slow.weights_version
    assert slow.update_params(weights(0), version=present + 10) == present + 10
    assert slow.update_params(weights(0)) == present + 11 == slow.weights_version
    pending, _ = _begun(slow)
    for wrong, message in (
        (dict(version=present, running="abort"), "versions increase"),
        (dict(version=1.5), "whole number"),
        (dict(kv="keep"), "running='finish' is not allowed"),
        (dict(kv="drop"), "'recompute', 'keep'"),
        (dict(max_staleness=-1, running="keep"), "at least 0"),
        (dict(max_staleness=True, running="keep"), "max_staleness=True"),
    ):
        with pytest.raises(InvalidConfigError, match=message):
            slow.update_params(weights(1), **wrong)
    assert pending.result(60).finish_reason == "length"
    assert slow.generate(PROMPT, SamplingParams(max_tokens=2)).weights_version == present + 11


def test_true_is_no_version():
    """Although it equals 1, which may follow the first weights."""
    assert WeightUpdate(version=1).after(Weights()).version == 1
    with pytest.raises(InvalidConfigError, match="version=True is not allowed"):
        WeightUpdate(version=True).after(Weights())


def _with_nan(params: nnx.State) -> nnx.State:
    leaves, structure = jax.tree.flatten(params)
    leaves[3] = leaves[3].at[(0,) * leaves[3].ndim].set(jnp.nan)
    return jax.tree.unflatten(structure, leaves)


@pytest.mark.release
def test_an_update_that_fails_leaves_the_old_weights(slow):
    """NaN, deleted arrays and other structures; the request that runs does not notice."""
    slow.update_params(weights(0))
    version = slow.weights_version
    wanted = slow.generate(PROMPT, LONG).token_ids
    deleted = jax.tree.map(jnp.copy, weights(1))
    jax.tree.leaves(deleted)[0].delete()
    pending, _ = _begun(slow)
    for wrong, message in (
        (_with_nan(weights(1)), "has NaN or infinite numbers; the present weights"),
        (deleted, "was deleted"),
        (nnx.to_pure_dict(weights(1)), "type dict"),
        (weights(1, num_layers=3), "is unknown"),
        (jax.tree.map(lambda x: x.astype(jnp.int32), weights(1)), "int32.*instead of float32"),
    ):
        with pytest.raises(InvalidParamsError, match=message):
            slow.update_params(wrong, running="restart")
    assert pending.result(60).token_ids == wanted
    assert slow.weights_version == version


@pytest.mark.release
def test_a_pause_halts_requests_and_takes_updates(slow):
    """No step runs; requests are accepted and cancelled; all go on with the same tokens."""
    slow.update_params(weights(0))
    wanted = slow.generate(PROMPT, LONG).token_ids
    halted, _ = _begun(slow)
    slow.pause()
    num_steps = slow.stats().num_steps
    later = slow.submit(PROMPT, LONG)
    unwanted = slow.submit(PROMPT, LONG)
    slow.cancel(unwanted.request_id)
    assert unwanted.result(60).finish_reason == "cancelled"
    with pytest.raises(TimeoutError):
        halted.result(0.1)
    assert slow.stats().num_steps == num_steps
    with pytest.raises(InvalidConfigError, match="'finish', 'restart', 'abort', 'keep'"):
        slow.pause("wait")
    slow.pause()
    slow.resume()
    assert halted.result(60).token_ids == later.result(60).token_ids == wanted
    slow.pause()
    later = slow.submit(PROMPT, LONG)
    slow.update_params(weights(1))  # which continues requests while the runtime is paused
    slow.update_params(weights(2), running="restart")
    slow.resume()
    tokens = later.result(60).token_ids
    assert list(tokens) == _greedy(2, [*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
    assert later.result().weights_version == slow.weights_version
    slow.check_integrity()


def test_nothing_waits_for_ends_during_a_pause(slow):
    """Calls that wait for running requests say what to do; closing a paused runtime ends them."""
    slow.pause("abort")
    for call in (
        lambda: slow.update_params(weights(0), running="finish"),
        lambda: slow.measure_step_times(rounds=1),
        lambda: slow.pause("finish"),
    ):
        with pytest.raises(TimeoutError, match=r"call rt\.resume"):
            call()
    slow.resume()
    with Runtime(tiny_llama(0), **tiny.OPTIONS) as rt:
        rt.pause()
        pending = rt.submit(PROMPT, LONG)
    assert pending.result(0).finish_reason in ("cancelled", "error")  # if it had not begun


@pytest.mark.release
def test_memory_is_given_back_and_taken_again():
    """Pool and weights are free meanwhile; requests keep their tokens, and nothing compiles."""
    with Runtime(tiny_llama(0), **SLOW) as rt:
        stats = rt.stats()
        wanted = rt.generate(PROMPT, LONG).token_ids
        before = _live_bytes()  # while no step takes the pool and gives it back
        pending, _ = _begun(rt)
        rt.sleep()
        assert before - _live_bytes() > 0.8 * stats.pool_bytes
        later = rt.submit(PROMPT, LONG)
        for call in (rt.resume, lambda: rt.resize_kv("1MB"), lambda: rt.export_kv(PROMPT)):
            with pytest.raises(EngineBusyError, match=r"call rt\.wake_up"):
                call()
        rt.wake_up()
        assert pending.result(60).token_ids == later.result(60).token_ids == wanted
        pending, _ = _begun(rt)
        rt.sleep()
        rt.sleep(drops_weights=True)
        assert before - _live_bytes() > 0.8 * stats.pool_bytes + 0.9 * stats.weights_bytes
        with pytest.raises(InvalidConfigError, match=r"call rt\.update_params"):
            rt.wake_up()
        with pytest.raises(InvalidParamsError, match="partial=True is not allowed"):
            rt.update_params(weights(1), partial=True)
        rt.update_params(weights(1))
        rt.wake_up()
        tokens = pending.result(60).token_ids
        num_old = pending.result().samples[0].version_runs[0][1]
        assert tokens[:num_old] == wanted[:num_old]
        greedy = _greedy(1, [*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
        assert list(tokens[num_old:]) == greedy[num_old:]
        assert rt.stats().num_compilations == stats.num_compilations
        rt.check_integrity()


def _merged(old: nnx.State, new: nnx.State) -> nnx.State:
    return nnx.from_flat_state(
        list((dict(nnx.to_flat_state(old)) | dict(nnx.to_flat_state(new))).items())
    )


@pytest.mark.parametrize(
    "options",
    some([{}, {"quantize": "int8"}, {"mesh": StagePlan.of([1, 1])}], 0, 1),
    ids=["dense", "int8", "stages"],
)
def test_a_part_of_the_weights_is_updated(options):
    """The others stay; a part with unknown parameters is refused."""
    each = SamplingParams(max_tokens=12)
    part = nnx.from_flat_state(
        [(path, v) for path, v in nnx.to_flat_state(weights(1)) if path[:2] == ("blocks", 1)]
    )
    with Runtime(tiny_llama(0), **tiny.OPTIONS | options) as rt:
        first = rt.generate(PROMPT, each).token_ids
        with pytest.raises(InvalidParamsError, match="is missing"):
            rt.update_params(part)
        rt.update_params(part, partial=True)
        partly = rt.generate(PROMPT, each).token_ids
        unknown = nnx.State({"head": part["blocks"]})
        with pytest.raises(InvalidParamsError, match="is unknown"):
            rt.update_params(unknown, partial=True)
        rt.update_params(_merged(weights(0), part))
        assert first != partly == rt.generate(PROMPT, each).token_ids


@pytest.mark.release
def test_weights_come_from_another_mesh_and_dtype():
    """They are moved from the trainer's devices, and cast, in one replica or two."""
    each = SamplingParams(max_tokens=12)
    halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights(1))
    rounded = jax.tree.map(lambda x: x.astype(jnp.float32), halves)
    with Runtime(tiny_llama(0), rounded, **tiny.OPTIONS) as rt:
        wanted = rt.generate(PROMPT, each).token_ids
    trained = jax.device_put(halves, state_shardings(halves, make_mesh(tensor=2)))
    for mesh in (None, make_mesh(data=2)):
        with Runtime(tiny_llama(0), mesh=mesh, **tiny.OPTIONS) as rt:
            assert rt.update_params(trained) == 1
            done = rt.generate([PROMPT] * 4, each)
            assert {c.token_ids for c in done} == {wanted}
            assert {c.weights_version for c in done} == {1}
