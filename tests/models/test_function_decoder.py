"""A plain function of parameters, tokens and attention is served like a family."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import (
    InvalidConfigError,
    InvalidParamsError,
    UnsupportedModelError,
)
from jaxserve.models.function import FunctionDecoder
from jaxserve.sharding import make_mesh
from tests.common.tiers import some

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 61, 48, 2, 4, 2, 16
SIZES = dict(
    vocab_size=VOCAB,
    num_layers=LAYERS,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    max_position_embeddings=64,
)
SERVING = dict(max_slots=4, max_step_tokens=32, page_size=16, kv_memory="4MiB", progress=False)


def _params(seed: int) -> dict:
    rng = np.random.default_rng(seed)

    def drawn(*shape):
        return jnp.asarray(rng.normal(0, shape[0] ** -0.5, shape), jnp.float32)

    layers = [
        {
            "q": drawn(WIDTH, HEADS * HEAD_DIM),
            "kv": drawn(WIDTH, 2 * KV_HEADS * HEAD_DIM),
            "out": drawn(HEADS * HEAD_DIM, WIDTH),
        }
        for _ in range(LAYERS)
    ]
    return {
        "embed": drawn(VOCAB, WIDTH) * 8,
        "place": drawn(64, WIDTH) * 4,
        "layers": layers,
        "head": drawn(WIDTH, VOCAB),
    }


def _hidden(params, tokens, positions, attend):
    x = params["embed"][tokens] + params["place"][positions]
    for layer in params["layers"]:
        q = (x @ layer["q"]).reshape(-1, HEADS, HEAD_DIM)
        k, v = jnp.split((x @ layer["kv"]).reshape(-1, 2 * KV_HEADS, HEAD_DIM), 2, axis=1)
        x = x + attend(jnp.tanh(q), k, v).reshape(len(x), -1) @ layer["out"]
    return x


def _head(params, hidden):
    return hidden @ params["head"]


def _logits(params, tokens, positions, attend):
    return _head(params, _hidden(params, tokens, positions, attend))


def _reference(params, tokens) -> np.ndarray:
    return np.asarray(_whole(params, jnp.asarray(tokens)))


@jax.jit
def _whole(params, tokens):
    """Return the logits of one sequence, with attention written out."""

    def attend(q, k, v):
        k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        seen = jnp.tril(jnp.ones(scores.shape[1:], bool))
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)

    return _logits(params, tokens, jnp.arange(len(tokens)), attend)


def _decoder(params, *, has_head: bool = True) -> FunctionDecoder:
    if has_head:
        return FunctionDecoder(_hidden, params, head=_head, hidden_size=WIDTH, **SIZES)
    return FunctionDecoder(_logits, params, **SIZES)


def _assert_greedy(params, prompt, answer) -> None:
    logits = _reference(params, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
    assert list(answer) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("has_head", some([True, False]))
def test_greedy_answers_are_those_of_the_function(has_head):
    """In batches, chunks of prompts and over several pages, tokens are those of whole sequences."""
    old, new = _params(0), _params(1)
    prompts = [list(range(3, 3 + length)) for length in (5, 1, 40)]
    with Runtime(_decoder(old, has_head=has_head), **SERVING) as rt:
        for params in (old, new):
            if params is new:
                rt.update_params(_decoder(old, has_head=has_head).with_params(new))
            done = rt.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
            for prompt, completion in zip(prompts, done, strict=True):
                _assert_greedy(params, prompt, completion.token_ids)


@pytest.mark.release
def test_logits_of_whole_sequences():
    """Training sees the logits that serving has, with gradients."""
    params, tokens = _params(0), jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 8]])
    decoder = _decoder(params)
    wanted = np.stack([_reference(params, each) for each in tokens])
    np.testing.assert_allclose(decoder.whole_logits(tokens), wanted, rtol=1e-4, atol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, decoder.params, params)

    def loss(params):
        return decoder.with_params(params).whole_logprobs(tokens).sum()

    grads = jax.grad(loss)(params)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))


def _attends(times: int):
    def apply(params, tokens, positions, attend):
        x = params["embed"][tokens]
        q = jnp.zeros((len(x), HEADS, HEAD_DIM))
        k = jnp.zeros((len(x), KV_HEADS, HEAD_DIM))
        for _ in range(times):
            attend(q, k, k)
        return x @ params["head"]

    return apply


@pytest.mark.fast
@pytest.mark.parametrize(
    ("apply", "said"),
    [
        (_attends(1), "calls attend 1 times, and num_layers is 2"),
        (_attends(3), "calls attend more than num_layers=2 times"),
        (lambda p, t, *_: p["embed"][t], "calls attend 0 times"),
        (
            lambda p, t, s, attend: [attend(jnp.zeros((len(t), 1, 1)), t, t)],
            "attend needs q, k and v of the shapes",
        ),
        (lambda p, *rest: _attends(2)(p, *rest)[:, :3], "has to return .tokens, vocab_size."),
    ],
    ids=["few", "many", "none", "shapes", "width"],
)
def test_a_function_of_another_form_is_refused(apply, said):
    """The message names what the function did."""
    decoder = FunctionDecoder(apply, _params(0), **SIZES)
    with pytest.raises(UnsupportedModelError, match=said):
        jax.eval_shape(decoder.whole_logits, jnp.zeros((1, 4), jnp.int32))


@pytest.mark.release
@pytest.mark.parametrize(
    "options",
    [
        dict(mesh=make_mesh(tensor=2)),
        dict(mesh=make_mesh(data=2)),
        dict(speculation="lookup"),
        dict(policy="pensieve"),
    ],
    ids=["tensor", "data", "speculation", "pensieve"],
)
def test_what_else_serves_it(options):
    """Answers and scores are those of the function, on meshes and with speculation too."""
    params, prompts = _params(0), [[1, 2, 3, 4] * 5, [7, 8]]
    with Runtime(_decoder(params), **SERVING, **options) as rt:
        for completion in rt.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True)):
            _assert_greedy(params, completion.prompt_token_ids, completion.token_ids)
        scores = rt.score(prompts[0])
    logits = jax.nn.log_softmax(_reference(params, prompts[0])[:-1])
    wanted = np.asarray(logits)[np.arange(19), prompts[0][1:]]
    np.testing.assert_allclose(scores, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.release
def test_parameters_have_their_own_dtypes():
    """The dtype of the decoder is that of the cache."""
    decoder = FunctionDecoder(_logits, _params(0), **SIZES, dtype="bfloat16")
    with Runtime(decoder, **SERVING) as rt:
        assert (
            len(rt.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3
        )
        with pytest.raises(UnsupportedModelError, match="with Orbax, or write a family"):
            rt.save_pretrained("anywhere", like={})


@pytest.mark.fast
def test_other_trees_are_refused():
    """New parameters have the tree of the old ones."""
    with pytest.raises(InvalidParamsError, match="pass parameters of the same tree"):
        _decoder(_params(0)).with_params({"embed": jnp.zeros(3)})


@pytest.mark.fast
@pytest.mark.parametrize(
    "options", [dict(quantize="int8"), dict(max_adapters=1), dict(deterministic=True)]
)
def test_options_that_need_a_family_are_refused(options):
    """Nothing is ignored in silence."""
    with pytest.raises((UnsupportedModelError, InvalidConfigError), match="family"):
        Runtime(_decoder(_params(0)), **SERVING, **options)
