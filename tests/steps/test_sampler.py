"""The sampler against an obvious reference, and its promises about batches and bad rows."""

from __future__ import annotations

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from jaxserve.steps.sampling.sampler import Sampled, SamplingNeeds, SlotSampling, sample

# Few shapes, for each costs a compilation.
NUM_ROWS, VOCAB, CONTEXT = 32, 1000, 24
num_traces = 0


@jax.jit
def sample_jit(*args) -> Sampled:
    global num_traces
    num_traces += 1
    return sample(*args)


def slots(num_rows: int, **given) -> SlotSampling:
    """Parameters that change nothing, greedy, but for those given (scalars or one a row)."""
    neutral = dict(
        temperature=np.float32(0),
        top_k=np.int32(0),
        top_p=np.float32(1),
        min_p=np.float32(0),
        repetition_penalty=np.float32(1),
        presence_penalty=np.float32(0),
        frequency_penalty=np.float32(0),
        seed=np.uint32(0),
        min_length=np.int32(0),
        prompt_length=np.int32(1),
    )
    wide = dict(
        stop_ids=np.full((num_rows, MAX_STOP_TOKEN_IDS), -1, np.int32),
        bias_ids=np.full((num_rows, MAX_LOGIT_BIAS), -1, np.int32),
        bias_values=np.zeros((num_rows, MAX_LOGIT_BIAS), np.float32),
    )
    values = {
        name: jnp.asarray(
            np.broadcast_to(np.asarray(given.get(name, value), value.dtype), num_rows)
        )
        for name, value in neutral.items()
    }
    values |= {name: jnp.asarray(given.get(name, value)) for name, value in wide.items()}
    return SlotSampling(**values)


def needing(*names: str) -> SamplingNeeds:
    return SamplingNeeds(**{f.name: jnp.asarray(f.name in names) for f in fields(SamplingNeeds)})


EVERYTHING = needing(*(f.name for f in fields(SamplingNeeds)))


def run(logits, params, *, tokens=None, length=None, needs=EVERYTHING) -> Sampled:
    num_rows = len(logits)
    tokens = np.zeros((num_rows, CONTEXT), np.int32) if tokens is None else tokens
    length = np.ones(num_rows, np.int32) if length is None else np.asarray(length, np.int32)
    return sample_jit(
        jnp.asarray(logits, jnp.float32), params, jnp.asarray(tokens), jnp.asarray(length), needs
    )


def random_params(rng: np.random.Generator, num_rows: int, vocab: int) -> SlotSampling:
    def some(active, neutral):
        return np.where(rng.random(num_rows) < 0.5, active, neutral)

    stop_ids = np.full((num_rows, MAX_STOP_TOKEN_IDS), -1, np.int32)
    bias_ids = np.full((num_rows, MAX_LOGIT_BIAS), -1, np.int32)
    bias_values = rng.normal(size=(num_rows, MAX_LOGIT_BIAS)).astype(np.float32) * 5
    for row in range(num_rows):
        chosen = rng.permutation(vocab)
        stop_ids[row, : row % 5] = chosen[: row % 5]
        bias_ids[row, : row % 7] = chosen[-(row % 7) or vocab :]
    return slots(
        num_rows,
        temperature=some(rng.uniform(0.3, 2, num_rows), 0),
        top_k=some(rng.integers(1, vocab + 5, num_rows), 0),
        top_p=some(rng.uniform(0.05, 1, num_rows), 1),
        min_p=some(rng.uniform(0, 0.3, num_rows), 0),
        repetition_penalty=some(rng.uniform(0.5, 2, num_rows), 1),
        presence_penalty=some(rng.uniform(-1, 2, num_rows), 0),
        frequency_penalty=some(rng.uniform(-1, 2, num_rows), 0),
        seed=rng.integers(0, 2**32, num_rows, np.uint64),
        min_length=rng.integers(0, CONTEXT, num_rows),
        prompt_length=rng.integers(1, 8, num_rows),
        stop_ids=stop_ids,
        bias_ids=bias_ids,
        bias_values=bias_values,
    )


def adjusted_logits(row: dict, logits: np.ndarray, history: np.ndarray) -> np.ndarray:
    """Penalties, bias and forbidden stop tokens, one token at a time."""
    adjusted = logits.astype(np.float64)
    for token in set(history.tolist()):
        penalty = row["repetition_penalty"]
        adjusted[token] *= penalty if adjusted[token] <= 0 else 1 / penalty
    output = history[row["prompt_length"] :].tolist()
    for token in set(output):
        adjusted[token] -= row["presence_penalty"] + row["frequency_penalty"] * output.count(token)
    for token, bias in zip(row["bias_ids"], row["bias_values"], strict=True):
        if token >= 0:
            adjusted[token] += bias
    if len(history) < row["min_length"]:
        adjusted[row["stop_ids"][row["stop_ids"] >= 0]] = -np.inf
    return adjusted


def distribution(row: dict, adjusted: np.ndarray) -> tuple[np.ndarray, float]:
    """Probabilities after truncation, and how near top-p's sum came to deciding otherwise."""
    scaled = (adjusted - adjusted.max()) / row["temperature"]
    p = np.exp(scaled)
    if row["top_k"] > 0:
        p[scaled < np.sort(scaled)[-min(row["top_k"], len(p))]] = 0
    p /= p.sum()
    margin = 1.0
    if row["top_p"] < 1:
        ordered = np.sort(p)[::-1]
        cumulative = np.cumsum(ordered)
        margin = np.abs(cumulative - row["top_p"]).min()
        p[p < ordered[min(np.sum(cumulative < row["top_p"]), len(p) - 1)]] = 0
    p[p < row["min_p"] * p.max()] = 0
    return p / p.sum(), margin


def uniform(seed: int, position: int) -> float:
    key = jax.random.fold_in(jax.random.key(np.uint32(seed), impl="threefry2x32"), position)
    return float(jax.random.bits(key, dtype=jnp.uint32)) / 2**32


@pytest.mark.parametrize("vocab", [12, VOCAB])
@pytest.mark.parametrize("ties", [False, True])
def test_matches_reference(vocab, ties):
    """Every row gets the token that a sequential float64 sampler picks from the same number."""
    rng = np.random.default_rng(vocab)
    num_rows, checked = NUM_ROWS, 0
    for _ in range(4):
        params = random_params(rng, num_rows, vocab)
        logits = rng.normal(size=(num_rows, vocab)).astype(np.float32) * 2
        logits = np.round(logits * 4) / 4 if ties else logits
        tokens = rng.integers(0, min(vocab, 15), (num_rows, CONTEXT), np.int32)
        length = rng.integers(8, CONTEXT, num_rows)
        got = run(logits, params, tokens=tokens, length=length)
        assert np.asarray(got.finite).all()
        for r in range(num_rows):
            row = {f.name: np.asarray(getattr(params, f.name))[r] for f in fields(params)}
            adjusted = adjusted_logits(row, logits[r], tokens[r, : length[r]])
            token = int(got.token[r])
            if row["temperature"] == 0:
                assert adjusted[token] == pytest.approx(adjusted.max(), abs=1e-5)
                continue
            p, margin = distribution(row, adjusted)
            if margin < 1e-5:
                continue
            checked += 1
            assert p[token] > 0
            end, u = np.cumsum(p)[token], uniform(row["seed"], length[r])
            assert end - p[token] - 1e-5 <= u <= end + 1e-5
    assert checked > 40


def test_logprobs_are_the_models_own():
    """Log-probabilities ignore penalties, bias and temperature; equals come in id order."""
    rng = np.random.default_rng(3)
    logits = np.round(rng.normal(size=(NUM_ROWS, VOCAB)).astype(np.float32) * 2) / 2
    got = run(logits, random_params(rng, NUM_ROWS, VOCAB))
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    order = np.argsort(-exact, axis=-1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(got.top_ids, order)
    np.testing.assert_allclose(got.top_logprobs, np.take_along_axis(exact, order, 1), atol=1e-4)
    np.testing.assert_allclose(got.logprob, exact[np.arange(NUM_ROWS), got.token], atol=1e-4)


def test_logprobs_of_a_tiny_vocabulary_are_padded():
    """A vocabulary under 20 tokens fills the remaining places with minus infinity."""
    got = run(np.zeros((NUM_ROWS, 12)), slots(NUM_ROWS))
    np.testing.assert_array_equal(got.top_ids[0, :12], np.arange(12))
    assert np.all(np.asarray(got.top_logprobs)[:, 12:] == -np.inf)


def test_frequencies_follow_the_distribution():
    """Over many positions and seeds tokens are drawn as often as their probabilities say."""
    p = np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.04, 0.03, 0.01, 0.01, 0.005, 0.005])
    logits = np.tile(np.log(p), (NUM_ROWS, 1))
    params = slots(NUM_ROWS, temperature=1, seed=np.arange(NUM_ROWS))
    needs, num_positions = needing("random"), 256
    drawn = [
        run(logits, params, length=np.full(NUM_ROWS, i), needs=needs).token
        for i in range(num_positions)
    ]
    expected = p * NUM_ROWS * num_positions
    counts = np.bincount(np.concatenate(drawn), minlength=12)
    assert np.sum((counts - expected) ** 2 / expected) < 37.4  # 11 degrees of freedom, 1 in 10,000


def test_row_is_independent_of_its_batch():
    """A row alone, in company, or in another place draws the same tokens at every position."""
    rng = np.random.default_rng(5)
    params = random_params(rng, 32, VOCAB)
    params = replace(params, temperature=jnp.ones(32), seed=params.seed.at[9].set(4))
    logits = rng.normal(size=(24, 32, VOCAB)).astype(np.float32)
    tokens = rng.integers(0, VOCAB, (32, CONTEXT), np.int32)

    def stream(rows: list[int]) -> np.ndarray:
        chosen = jax.tree.map(lambda x: x[np.array(rows)], params)
        return np.stack(
            [
                run(logits[i, rows], chosen, tokens=tokens[rows], length=[i] * len(rows)).token
                for i in range(24)
            ]
        )

    whole = stream(list(range(32)))
    for rows in ([9], [31, 30, 9, 8, 1], list(range(31, -1, -1))):
        np.testing.assert_array_equal(stream(rows), whole[:, rows])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 7, 64, 999])
def test_bad_row_is_reported_and_harms_no_other(bad, place):
    """A row with NaN or +inf, or of -inf only, gives token 0, not finite; others are unchanged."""
    rng = np.random.default_rng(6)
    params = random_params(rng, NUM_ROWS, VOCAB)
    logits = rng.normal(size=(NUM_ROWS, VOCAB)).astype(np.float32)
    others = np.arange(NUM_ROWS) != 2
    for needs in (EVERYTHING, needing()):
        before = run(logits, params, needs=needs)
        spoilt = logits.copy()
        spoilt[2, slice(None) if bad == -np.inf else place] = bad
        after = run(spoilt, params, needs=needs)
        np.testing.assert_array_equal(after.finite, others)
        assert after.token[2] == 0 and after.logprob[2] == 0
        for name in ("token", "logprob", "top_ids", "top_logprobs"):
            x, y = getattr(before, name), getattr(after, name)
            np.testing.assert_array_equal(x[others], y[others])


def test_minus_infinity_is_an_ordinary_logit():
    """A row partly at -inf is finite, and what is at -inf is never drawn."""
    logits = np.full((NUM_ROWS, VOCAB), -np.inf)
    logits[:, [5, VOCAB - 1]] = 0.0
    params = slots(NUM_ROWS, temperature=100, seed=np.arange(NUM_ROWS))
    got = run(logits, params, needs=needing("random"))
    assert np.asarray(got.finite).all()
    assert set(np.asarray(got.token).tolist()) == {5, VOCAB - 1}


def test_nothing_left_to_choose_is_reported():
    """Forbidding every token that the logits allow gives finite False, not a forbidden token."""
    logits = np.full((NUM_ROWS, VOCAB), -np.inf)
    logits[:, 3] = 1.0
    stop_ids = np.full((NUM_ROWS, MAX_STOP_TOKEN_IDS), -1, np.int32)
    stop_ids[:, 0] = 3
    assert run(logits, slots(NUM_ROWS)).finite.all()
    assert not run(logits, slots(NUM_ROWS, stop_ids=stop_ids, min_length=9)).finite.any()


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 1.0, 100.0])
def test_extreme_temperatures(temperature):
    """The coldest temperatures pick the likeliest token; none gives an impossible one."""
    logits = np.random.default_rng(8).normal(size=(NUM_ROWS, VOCAB)).astype(np.float32) * 30
    logits[:, 100:] = -np.inf
    params = slots(
        NUM_ROWS, temperature=temperature, seed=np.arange(NUM_ROWS), top_p=0.999, top_k=300
    )
    token = np.asarray(run(logits, params).token)
    assert token.max() < 100
    if temperature < 1e-3:
        np.testing.assert_array_equal(token, logits.argmax(-1))


def test_wide_truncation_is_exact():
    """Top-k and top-p that reach far into a large vocabulary keep exactly the right tokens."""
    vocab, num_rows = 20_000, NUM_ROWS
    logits = np.random.default_rng(9).normal(size=vocab).astype(np.float32)
    p = np.exp(logits.astype(np.float64))
    ranks = np.argsort(np.argsort(-logits))
    cumulative = np.cumsum(np.sort(p / p.sum())[::-1])
    params = slots(
        num_rows,
        temperature=1,
        seed=np.arange(num_rows),
        top_k=np.where(np.arange(num_rows) % 2, 1500, 0),
        top_p=np.where(np.arange(num_rows) % 2, 1.0, 0.5),
    )
    kept = np.where(np.arange(num_rows) % 2, 1500, np.sum(cumulative < 0.5) + 1)
    seen = np.array(
        [
            ranks[
                np.asarray(run(np.tile(logits, (num_rows, 1)), params, length=[i] * num_rows).token)
            ]
            for i in range(20)
        ]
    )
    assert (seen < kept).all()
    assert (seen[:, ::2].max() > 0.9 * kept[0]) and (seen[:, 1::2].max() > 0.9 * 1500)


def test_one_executable_serves_all_needs():
    """Needs are values on the device: no combination compiles again."""
    logits = np.random.default_rng(10).normal(size=(NUM_ROWS, VOCAB))
    params = slots(NUM_ROWS, temperature=1)
    run(logits, params)
    before = num_traces
    names = [f.name for f in fields(SamplingNeeds)]
    for bits in range(2 ** len(names)):
        needs = needing(*(name for i, name in enumerate(names) if bits >> i & 1))
        got = run(logits, params, needs=needs)
        assert bool(got.logprob.any()) == bool(needs.logprobs)
        assert bool(got.top_logprobs.any()) == bool(needs.top_logprobs)
    assert num_traces == before > 0


def test_runs_inside_a_loop():
    """A decode loop on the device draws what steps from the host draw."""
    logits = jnp.asarray(np.random.default_rng(11).normal(size=(NUM_ROWS, 12)), jnp.float32)
    params = slots(NUM_ROWS, temperature=1, frequency_penalty=2, seed=np.arange(NUM_ROWS))
    needs = needing("random", "penalties")
    start = jnp.zeros((NUM_ROWS, CONTEXT), jnp.int32)

    def step(i, tokens, sample):
        length = jnp.full(NUM_ROWS, i, jnp.int32)
        return tokens.at[:, i].set(sample(logits, params, tokens, length, needs).token)

    looped = jax.jit(
        lambda tokens: jax.lax.fori_loop(1, CONTEXT, lambda i, t: step(i, t, sample), tokens)
    )(start)
    for i in range(1, CONTEXT):
        start = step(i, start, sample_jit)
    np.testing.assert_array_equal(looped, start)
