"""Choosing the next token, on the device.

One executable serves every batch: what no row needs is skipped by a branch on `SamplingNeeds`, and
an all-greedy batch pays for an argmax only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp

from jaxserve.core.sampling_params import MAX_LOGPROBS
from jaxserve.steps.sampling.logprobs import likeliest, log_normalizer, token_logprobs
from jaxserve.steps.sampling.random_choice import draw, truncation_limit
from jaxserve.steps.sampling.top_k import argmax

_VOCAB_MULTIPLE = 256


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotSampling:
    """Sampling parameters of every slot. [S] unless noted.

    temperature f32 (0 greedy), top_k i32 (0 off), top_p f32, min_p f32, repetition_penalty f32,
    presence_penalty f32, frequency_penalty f32, seed uint32,
    stop_ids i32 [S, MAX_STOP_TOKEN_IDS] padded with -1,
    min_length i32: stop tokens are forbidden while prompt + output tokens are fewer,
    prompt_length i32, bias_ids i32 [S, MAX_LOGIT_BIAS] padded with -1, bias_values f32 likewise.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    seed: jax.Array
    stop_ids: jax.Array
    min_length: jax.Array
    prompt_length: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingNeeds:
    """What any row of the batch asks for: bool scalars on the device, branches of one executable.

    random: some row has a temperature; truncation: some row has top-k or top-p;
    penalties; constraints: some row has logit bias or min_length; logprobs; top_logprobs.
    """

    random: jax.Array
    truncation: jax.Array
    penalties: jax.Array
    constraints: jax.Array
    logprobs: jax.Array
    top_logprobs: jax.Array


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """What was chosen for each row, in one pytree for one copy to the host.

    token i32 [R], logprob f32 [R], top_ids i32 and top_logprobs f32 [R, MAX_LOGPROBS] (zeros
    where no row asked; at -inf past the end of a smaller vocabulary), finite bool [R]: False
    where the logits held a NaN, +inf or nothing but -inf, or where nothing was left to choose;
    such a row's other fields are zeros.
    """

    token: jax.Array
    logprob: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    finite: jax.Array


def sample(
    logits: jax.Array,  # f32 [R, vocab]
    params: SlotSampling,  # of the R rows
    tokens: jax.Array,  # i32 [R, max_context]: prompt and output so far
    length: jax.Array,  # i32 [R]: how many of them are valid = position of the token to choose
    needs: SamplingNeeds,
) -> Sampled:
    """Choose one token a row; a row's choice depends on nothing outside the row.

    Semantics are those of `SamplingParams`. May be called under jit and inside loops.
    """
    likeliest_token, largest = argmax(logits)
    # A maximum may pass over a NaN; a sum never does.
    finite = jnp.isfinite(largest) & ~jnp.isnan(jnp.sum(logits, axis=-1))
    token, found = jax.lax.cond(
        needs.penalties | needs.constraints | needs.random,
        lambda: _choose(logits, params, tokens, length, needs),
        lambda: (likeliest_token, jnp.full_like(finite, True)),
    )
    finite &= found
    token = jnp.where(finite, token, 0)

    normalizer = jax.lax.cond(
        needs.logprobs | needs.top_logprobs,
        lambda: log_normalizer(logits),
        lambda: jnp.zeros_like(largest),
    )
    logprob = jax.lax.cond(
        needs.logprobs,
        lambda: token_logprobs(logits, token, normalizer),
        lambda: jnp.zeros_like(largest),
    )
    shape = (logits.shape[0], MAX_LOGPROBS)
    top_ids, top_logprobs = jax.lax.cond(
        needs.top_logprobs,
        lambda: likeliest(logits, normalizer),
        lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)),
    )
    return Sampled(
        token=token,
        logprob=jnp.where(finite, logprob, 0.0),
        top_ids=jnp.where(finite[:, None], top_ids, 0),
        top_logprobs=jnp.where(finite[:, None], top_logprobs, 0.0),
        finite=finite,
    )


def _choose(
    logits: jax.Array,
    params: SlotSampling,
    tokens: jax.Array,
    length: jax.Array,
    needs: SamplingNeeds,
) -> tuple[jax.Array, jax.Array]:
    """Token i32 [R], and bool [R] whether there was any left to choose."""
    # Padded once here, not again in each pass below.
    extra = -logits.shape[1] % _VOCAB_MULTIPLE
    logits = jnp.pad(logits, ((0, 0), (0, extra)), constant_values=-jnp.inf)
    logits = jax.lax.cond(
        needs.penalties, lambda: _penalize(logits, params, tokens, length), lambda: logits
    )
    logits = jax.lax.cond(
        needs.constraints, lambda: _constrain(logits, params, length), lambda: logits
    )
    greedy_token, largest = argmax(logits)
    token = jax.lax.cond(
        needs.random,
        lambda: jnp.where(
            params.temperature > 0,
            _random_token(logits, largest, params, length, needs),
            greedy_token,
        ),
        lambda: greedy_token,
    )
    return token, jnp.isfinite(largest)


def _penalize(
    logits: jax.Array, params: SlotSampling, tokens: jax.Array, length: jax.Array
) -> jax.Array:
    rows = jnp.arange(logits.shape[0])[:, None]
    position = jnp.arange(tokens.shape[1])[None, :]
    nowhere = logits.shape[1]
    seen = jnp.where(position < length[:, None], tokens, nowhere)
    output = jnp.where(position >= params.prompt_length[:, None], seen, nowhere)

    # Every occurrence writes the same value, so a token seen twice is still penalized once.
    factor = params.repetition_penalty[:, None]
    before = logits.at[rows, seen].get(mode="fill", fill_value=0.0)
    after = jnp.where(before > 0, before / factor, before * factor)
    logits = logits.at[rows, seen].set(after, mode="drop")

    count = jnp.zeros(logits.shape, jnp.float32).at[rows, output].add(1.0, mode="drop")
    logits -= count * params.frequency_penalty[:, None]
    return logits - jnp.where(count > 0, params.presence_penalty[:, None], 0.0)


def _constrain(logits: jax.Array, params: SlotSampling, length: jax.Array) -> jax.Array:
    rows = jnp.arange(logits.shape[0])[:, None]
    nowhere = logits.shape[1]
    biased = jnp.where(params.bias_ids >= 0, params.bias_ids, nowhere)
    logits = logits.at[rows, biased].add(params.bias_values, mode="drop")
    too_short = (length < params.min_length)[:, None]
    forbidden = jnp.where(too_short & (params.stop_ids >= 0), params.stop_ids, nowhere)
    return logits.at[rows, forbidden].set(-jnp.inf, mode="drop")


def _random_token(
    logits: jax.Array,
    largest: jax.Array,  # f32 [R]
    params: SlotSampling,
    length: jax.Array,
    needs: SamplingNeeds,
) -> jax.Array:
    # Greedy rows are drawn too, as cheaply as can be, and the draw discarded.
    is_random = params.temperature > 0
    temperature = jnp.where(is_random, params.temperature, 1.0)
    top_k = jnp.where(is_random, params.top_k, 0)
    top_p = jnp.where(is_random, params.top_p, 1.0)
    gap = (largest[:, None] - logits) / temperature[:, None]
    limit = jax.lax.cond(
        needs.truncation,
        lambda: truncation_limit(gap, top_k, top_p),
        lambda: jnp.full_like(largest, jnp.inf),
    )
    return draw(gap, limit, params.min_p, _random_bits(params.seed, length))


def _random_bits(seed: jax.Array, position: jax.Array) -> jax.Array:
    def bits(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.key(seed, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, position), dtype=jnp.uint32)

    return jax.vmap(bits)(seed, position)
