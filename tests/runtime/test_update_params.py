"""New weights under a running engine are shared with their owner; nothing is lost or compiled."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import InvalidConfigError, InvalidParamsError
from jaxserve.sharding import make_mesh, state_shardings
from jaxserve.testing import SlowExecutor, WrapAll, tiny
from jaxserve.testing.tiny import MAX_CONTEXT, random_prompts, tiny_llama
from tests.runtime.serving import has_shards_of, pointers, tokens, until_tokens, weights

OPTIONS = tiny.OPTIONS | {"strict": True, "warmup": True}
PROMPTS = random_prompts(6, longest=30)
LONG = SamplingParams(max_tokens=MAX_CONTEXT - 31)


@pytest.fixture(scope="module")
def answers():
    """The answers by seed of the weights."""
    found = {}
    for seed in (0, 1):
        with Runtime(tiny_llama(seed), **OPTIONS) as rt:
            found[seed] = tokens(rt.generate(PROMPTS, LONG))
    assert found[0] != found[1]
    return found


def test_new_weights_are_shared_and_serve(answers):
    """Answers are the new weights', from the owner's arrays, without compilation."""
    first = weights(0)
    seen = WrapAll()
    with Runtime(tiny_llama(0), first, wrap_executor=seen, **OPTIONS) as rt:
        assert pointers(seen.executors[0].params) == pointers(first)
        assert tokens(rt.generate(PROMPTS, LONG)) == answers[0]
        before = rt.stats().num_compilations
        new = weights(1)
        rt.update_params(new)
        assert pointers(seen.executors[0].params) == pointers(new)
        assert tokens(rt.generate(PROMPTS, LONG)) == answers[1]
        assert rt.stats().num_compilations == before
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((first, new)))


def _begun(rt: Runtime):
    """Submit all prompts, and wait until some are in the middle of their answers."""
    pending = [rt.submit(prompt, LONG) for prompt in PROMPTS]
    until_tokens(rt, 60)
    return pending


def test_running_requests_finish_with_the_old_weights(answers):
    """Requests before the update have the old weights' answers, later ones the new weights'."""
    slow = WrapAll(SlowExecutor)
    with Runtime(tiny_llama(0), wrap_executor=slow, **OPTIONS) as rt:
        pending = _begun(rt)
        update = threading.Thread(target=rt.update_params, args=(weights(1),))
        update.start()
        assert [p.result(60).token_ids for p in pending] == answers[0]
        update.join(60)
        slow.executors[0].step_s = 0.0
        assert tokens(rt.generate(PROMPTS, LONG)) == answers[1]


def test_running_requests_start_over(answers):
    """Every answer is the new weights' from its first token on."""
    slow = WrapAll(SlowExecutor)
    with Runtime(tiny_llama(0), wrap_executor=slow, **OPTIONS) as rt:
        pending = _begun(rt)
        rt.update_params(weights(1), running="restart")
        slow.executors[0].step_s = 0.0
        got = [p.result(60).token_ids for p in pending]
        # The first request may have ended before the update.
        assert all(each in (answers[0][i], answers[1][i]) for i, each in enumerate(got))
        assert got[-1] == answers[1][-1]
        rt.check_integrity()


def test_a_stream_goes_on_with_the_new_weights(answers):
    """Tokens that were shown stay; the following tokens come from the new weights."""
    slow = WrapAll(SlowExecutor)
    with Runtime(tiny_llama(0), wrap_executor=slow, **OPTIONS) as rt:
        pieces = rt.stream(PROMPTS[0], LONG)
        shown = [*next(pieces).token_ids, *next(pieces).token_ids]
        rt.update_params(weights(1), running="restart")
        slow.executors[0].step_s = 0.0
        whole = shown + [token for piece in pieces for token in piece.token_ids]
        num_old = next(i for i, token in enumerate(whole) if token != answers[0][0][i])
        assert num_old >= len(shown)
        rest = rt.generate(
            [*PROMPTS[0], *whole[:num_old]], SamplingParams(max_tokens=LONG.max_tokens - num_old)
        )
        assert whole[num_old:] == list(rest.token_ids)


def test_running_requests_are_aborted(answers):
    """They end as cancelled with their tokens, and later ones are served."""
    slow = WrapAll(SlowExecutor)
    with Runtime(tiny_llama(0), wrap_executor=slow, **OPTIONS) as rt:
        pending = _begun(rt)
        rt.update_params(weights(1), running="abort")
        slow.executors[0].step_s = 0.0
        reasons = [p.result(60).finish_reason for p in pending]
        assert "cancelled" in reasons and set(reasons) <= {"cancelled", "length"}
        assert tokens(rt.generate(PROMPTS, LONG)) == answers[1]


@pytest.mark.release
def test_weights_are_moved_where_the_old_ones_are(answers):
    """Weights on one device are moved to the serving mesh; those on a mesh are shared."""
    mesh, seen = make_mesh(tensor=2), WrapAll()
    with Runtime(tiny_llama(0), mesh=mesh, wrap_executor=seen, **OPTIONS) as rt:
        rt.update_params(weights(1))
        assert tokens(rt.generate(PROMPTS, LONG)) == answers[1]
        trained = jax.device_put(weights(0), state_shardings(weights(0), mesh))
        rt.update_params(trained)
        assert has_shards_of(seen.executors[0].params, trained)
        assert tokens(rt.generate(PROMPTS, LONG)) == answers[0]


@pytest.mark.release
def test_parameters_have_the_dtype_of_the_configuration():
    """Parameters of a dtype other than the configuration's are refused before compiling."""
    halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights(1))
    with pytest.raises(InvalidConfigError, match=r"bfloat16.*says float32.*dtype='bfloat16'"):
        Runtime(tiny_llama(0), halves, **OPTIONS)
    with Runtime(tiny_llama(1, jnp.bfloat16), halves, **OPTIONS | {"warmup": False}) as rt:
        assert rt.model_config.dtype == "bfloat16"
        pages = rt.stats().pool_bytes / (rt.config.num_pages * rt.config.page_size)
        assert pages == 2 * 2 * 2 * 8 * 2  # layers, keys and values, heads, head_dim, bytes
        assert rt.generate(PROMPTS[0], SamplingParams(max_tokens=3)).finish_reason == "length"


def test_what_does_not_fit_is_refused():
    """The error names another shape or structure, and the runtime continues unchanged."""
    with Runtime(tiny_llama(0), **OPTIONS) as rt:
        before = rt.generate(PROMPTS[0], LONG).token_ids
        wider = weights(1, num_heads=8)
        with pytest.raises(InvalidConfigError, match=r"float32\(.*instead of float32\("):
            rt.update_params(wider)
        with pytest.raises(InvalidConfigError, match=r"blocks\.1\.\S+ is missing"):
            rt.update_params(nnx.State({**weights(1), "blocks": {0: weights(1)["blocks"][0]}}))
        raw = nnx.State(nnx.to_pure_dict(weights(1)))
        with pytest.raises(InvalidConfigError, match="pass a state of nnx.Param"):
            rt.update_params(raw)
        with pytest.raises(InvalidConfigError, match="'finish', 'restart', 'abort'"):
            rt.update_params(weights(1), running="wait")
        assert rt.generate(PROMPTS[0], LONG).token_ids == before


@pytest.mark.release
def test_donated_weights_are_named_and_an_update_brings_others(answers):
    """Running, waiting and later requests say what happened to the arrays; the runtime goes on."""
    slow = WrapAll(SlowExecutor)
    with Runtime(tiny_llama(0), shared := weights(0), wrap_executor=slow, **OPTIONS) as rt:
        pending = _begun(rt)
        step = jax.jit(lambda params: jax.tree.map(lambda x: 2 * x, params), donate_argnums=0)
        step(shared)
        for one in pending:
            error = one.result().error
            assert isinstance(error, InvalidParamsError) and "donated" in str(error)
        with pytest.raises(InvalidParamsError, match="were deleted"):
            rt.generate(PROMPTS[0], LONG)
        slow.executors[0].step_s = 0.0
        rt.update_params(weights(1))
        assert tokens(rt.generate(PROMPTS, LONG)) == answers[1]
