"""Choosing the next token, on the device.  (signature agreed; being written)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import jax


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
    """token i32 [R], logprob f32 [R], top_ids i32 [R, 20], top_logprobs f32 [R, 20], finite bool [R]."""

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
    raise NotImplementedError
