"""The sampler agrees with an obvious reference; batches and bad rows do not affect others."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import MAX_LOGPROBS
from jaxserve.steps.sampling.sampler import Variant, pack_sampling, sample
from tests.common.tiers import some
from tests.steps.sampling import (
    CONTEXT,
    NUM_ROWS,
    VOCAB,
    random_request,
    random_requests,
    request,
    run,
    sample_jit,
)


def adjusted_logits(request: Request, logits: np.ndarray, history: np.ndarray) -> np.ndarray:
    """Return logits after penalties, bias and forbidden stop tokens, one token at a time."""
    params = request.params
    adjusted = logits.astype(np.float64)
    for token in set(history.tolist()):
        penalty = params.repetition_penalty
        adjusted[token] *= penalty if adjusted[token] <= 0 else 1 / penalty
    output = history[len(request.prompt) :].tolist()
    for token in set(output):
        adjusted[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    for token, bias in (params.logit_bias or {}).items():
        adjusted[token] += bias
    if len(output) < params.min_tokens:
        adjusted[[*request.stop_token_ids, *request.end_token_ids]] = -np.inf
    return adjusted


def distribution(request: Request, adjusted: np.ndarray) -> tuple[np.ndarray, float]:
    """Return probabilities after truncation, and the margin by which top-p's sum decided."""
    params = request.params
    scaled = (adjusted - adjusted.max()) / params.temperature
    p = np.exp(scaled)
    if params.top_k > 0:
        p[scaled < np.sort(scaled)[-min(params.top_k, len(p))]] = 0
    p /= p.sum()
    margin = 1.0
    if params.top_p < 1:
        ordered = np.sort(p)[::-1]
        cumulative = np.cumsum(ordered)
        margin = np.abs(cumulative - params.top_p).min()
        p[p < ordered[min(np.sum(cumulative < params.top_p), len(p) - 1)]] = 0
    p[p < params.min_p * p.max()] = 0
    return p / p.sum(), margin


def uniform(seed: int, position: int) -> float:
    key = jax.random.fold_in(jax.random.key(np.uint32(seed), impl="threefry2x32"), position)
    return float(jax.random.bits(key, dtype=jnp.uint32)) / 2**32


@pytest.mark.parametrize("vocab", some([12, VOCAB]))
@pytest.mark.parametrize("ties", [False, True])
def test_matches_reference(vocab, ties):
    """Every row gets the token of a sequential float64 sampler for the same random number."""
    rng = np.random.default_rng(vocab)
    checked = 0
    for _ in range(4):
        requests = random_requests(rng, NUM_ROWS, vocab)
        logits = rng.normal(size=(NUM_ROWS, vocab)).astype(np.float32) * 2
        logits = np.round(logits * 4) / 4 if ties else logits
        tokens = rng.integers(0, min(vocab, 15), (NUM_ROWS, CONTEXT), np.int32)
        length = rng.integers(8, CONTEXT, NUM_ROWS)
        got = run(logits, requests, tokens=tokens, length=length)
        assert np.asarray(got.finite).all()
        for r, each in enumerate(requests):
            adjusted = adjusted_logits(each, logits[r], tokens[r, : length[r]])
            token = int(got.token[r])
            if each.params.is_greedy:
                assert adjusted[token] == pytest.approx(adjusted.max(), abs=1e-5)
                continue
            p, margin = distribution(each, adjusted)
            if margin < 1e-5:
                continue
            checked += 1
            assert p[token] > 0
            end, u = np.cumsum(p)[token], uniform(each.seed, length[r])
            assert end - p[token] - 1e-5 <= u <= end + 1e-5
            assert got.processed_logprob[r] == pytest.approx(np.log(p[token]), abs=1e-3)
    assert checked > 40


def test_logprobs_are_the_models_own():
    """Log-probabilities ignore penalties, bias and temperature; equal ones are in id order."""
    rng = np.random.default_rng(3)
    logits = np.round(rng.normal(size=(NUM_ROWS, VOCAB)).astype(np.float32) * 2) / 2
    got = run(logits, random_requests(rng, NUM_ROWS, VOCAB))
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    order = np.argsort(-exact, axis=-1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(got.top_ids, order)
    np.testing.assert_allclose(got.top_logprobs, np.take_along_axis(exact, order, 1), atol=1e-4)
    np.testing.assert_allclose(got.logprob, exact[np.arange(NUM_ROWS), got.token], atol=1e-4)


def test_logprobs_of_a_tiny_vocabulary_are_padded():
    """With fewer than 20 tokens the remaining places are minus infinity."""
    got = run(np.zeros((NUM_ROWS, 12)), [request()] * NUM_ROWS)
    np.testing.assert_array_equal(got.top_ids[0, :12], np.arange(12))
    assert np.all(np.asarray(got.top_logprobs)[:, 12:] == -np.inf)


def test_frequencies_follow_the_distribution():
    """Over many positions and seeds token frequencies agree with their probabilities."""
    p = np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.04, 0.03, 0.01, 0.01, 0.005, 0.005])
    logits = np.tile(np.log(p), (NUM_ROWS, 1))
    requests = [request(temperature=1, seed=i) for i in range(NUM_ROWS)]
    num_positions = 256
    drawn = [
        run(logits, requests, length=[i] * NUM_ROWS, variant=Variant.RANDOM).token
        for i in range(num_positions)
    ]
    expected = p * NUM_ROWS * num_positions
    counts = np.bincount(np.concatenate(drawn), minlength=12)
    assert np.sum((counts - expected) ** 2 / expected) < 37.4  # 11 degrees of freedom, 1 in 10,000


def test_row_is_independent_of_its_batch():
    """A row alone, in a batch, or in another place draws the same tokens at every position."""
    rng = np.random.default_rng(5)
    requests = [random_request(rng, VOCAB, is_random=True) for _ in range(NUM_ROWS)]
    logits = rng.normal(size=(24, NUM_ROWS, VOCAB)).astype(np.float32)
    tokens = rng.integers(0, VOCAB, (NUM_ROWS, CONTEXT), np.int32)

    def stream(rows: list[int]) -> np.ndarray:
        chosen = [requests[row] for row in rows]
        return np.stack(
            [
                run(logits[i, rows], chosen, tokens=tokens[rows], length=[i] * len(rows)).token
                for i in range(24)
            ]
        )

    whole = stream(list(range(NUM_ROWS)))
    for rows in ([9], [31, 30, 9, 8, 1], list(range(NUM_ROWS - 1, -1, -1))):
        np.testing.assert_array_equal(stream(rows), whole[:, rows])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", some([0, 7, 64, 999]))
def test_bad_row_is_reported_and_harms_no_other(bad, place):
    """A row with NaN or +inf, or only -inf, gives token 0, not finite; others are unchanged."""
    rng = np.random.default_rng(6)
    requests = random_requests(rng, NUM_ROWS, VOCAB)
    logits = rng.normal(size=(NUM_ROWS, VOCAB)).astype(np.float32)
    spoilt = logits.copy()
    spoilt[2, slice(None) if bad == -np.inf else place] = bad
    others = np.arange(NUM_ROWS) != 2
    for variant in Variant:
        before = run(logits, requests, variant=variant)
        after = run(spoilt, requests, variant=variant)
        np.testing.assert_array_equal(after.finite, others)
        assert after.token[2] == 0
        assert after.logprob is None or after.logprob[2] == 0
        for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(x[others], y[others])


def test_minus_infinity_is_an_ordinary_logit():
    """A row that is partly -inf is finite, and tokens at -inf are not drawn."""
    logits = np.full((NUM_ROWS, VOCAB), -np.inf)
    logits[:, [5, VOCAB - 1]] = 0.0
    requests = [request(temperature=100, seed=i) for i in range(NUM_ROWS)]
    got = run(logits, requests, variant=Variant.RANDOM)
    assert np.asarray(got.finite).all()
    assert set(np.asarray(got.token).tolist()) == {5, VOCAB - 1}


def test_nothing_left_to_choose_is_reported():
    """If all tokens that the logits allow are forbidden, finite is False and no token is drawn."""
    logits = np.full((NUM_ROWS, VOCAB), -np.inf)
    logits[:, 3] = 1.0
    assert run(logits, [request()] * NUM_ROWS).finite.all()
    assert not run(logits, [request(stop=[3], min_tokens=9)] * NUM_ROWS).finite.any()


def test_the_least_min_p_of_all_keeps_the_likeliest():
    """`min_p=1` draws among the tokens that are as likely as the likeliest one.

    It is in the range of `MinPLogitsWarper` of transformers 5.24.0, which keeps what has at least
    `min_p` times the largest probability, and of vLLM's `min_p`.
    """
    logits = np.random.default_rng(2).normal(size=(NUM_ROWS, VOCAB))
    logits[:, [7, 30]] = 9.0
    chosen = run(logits, [request(temperature=3.0, min_p=1.0, seed=i) for i in range(NUM_ROWS)])
    assert set(np.asarray(chosen.token).tolist()) == {7, 30}


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 1.0, 100.0])
def test_extreme_temperatures(temperature):
    """The lowest temperatures pick the likeliest token; none picks an impossible one."""
    logits = np.random.default_rng(8).normal(size=(NUM_ROWS, VOCAB)).astype(np.float32) * 30
    logits[:, 100:] = -np.inf
    requests = [
        request(temperature=temperature, seed=i, top_p=0.999, top_k=300) for i in range(NUM_ROWS)
    ]
    token = np.asarray(run(logits, requests).token)
    assert token.max() < 100
    if temperature < 1e-3:
        np.testing.assert_array_equal(token, logits.argmax(-1))


@pytest.mark.release
def test_wide_truncation_is_exact():
    """Top-k and top-p that keep much of a large vocabulary keep exactly the right tokens."""
    vocab = 20_000
    logits = np.random.default_rng(9).normal(size=vocab).astype(np.float32)
    p = np.exp(logits.astype(np.float64))
    ranks = np.argsort(np.argsort(-logits))
    cumulative = np.cumsum(np.sort(p / p.sum())[::-1])
    by_p, by_k = request(temperature=1, top_p=0.5), request(temperature=1, top_k=1500)
    requests = [replace(by_k if i % 2 else by_p, seed=i) for i in range(NUM_ROWS)]
    kept = np.where(np.arange(NUM_ROWS) % 2, 1500, np.sum(cumulative < 0.5) + 1)
    rows = np.tile(logits, (NUM_ROWS, 1))
    drawn = [
        run(rows, requests, length=[i] * NUM_ROWS, variant=Variant.RANDOM).token for i in range(20)
    ]
    seen = ranks[np.asarray(drawn)]
    assert (seen < kept).all()
    assert (seen[:, ::2].max() > 0.9 * kept[0]) and (seen[:, 1::2].max() > 0.9 * 1500)


def test_runs_inside_a_loop():
    """A decode loop on the device draws what steps from the host draw."""
    logits = jnp.asarray(np.random.default_rng(11).normal(size=(NUM_ROWS, 12)), jnp.float32)
    requests = [request(temperature=1, frequency_penalty=2, seed=i) for i in range(NUM_ROWS)]
    packed = pack_sampling([(each, 0) for each in requests], NUM_ROWS)
    sampling = jax.tree.map(jnp.asarray, packed)
    start = jnp.zeros((NUM_ROWS, CONTEXT), jnp.int32)

    def step(i, tokens, sample):
        length = jnp.full(NUM_ROWS, i, jnp.int32)
        chosen = sample(logits, sampling, tokens, length, variant=Variant.FULL)
        return tokens.at[:, i].set(chosen.token)

    looped = jax.jit(
        lambda tokens: jax.lax.fori_loop(1, CONTEXT, lambda i, t: step(i, t, sample), tokens)
    )(start)
    for i in range(1, CONTEXT):
        start = step(i, start, sample_jit)
    np.testing.assert_array_equal(looped, start)
