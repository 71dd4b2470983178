"""Choosing the next token, on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp

from jaxserve.steps.sampling.choice import RandomChoice, draw
from jaxserve.steps.sampling.largest import argmax
from jaxserve.steps.sampling.logprobs import likeliest, log_normalizer, token_logprobs
from jaxserve.steps.sampling.processors import PROCESSORS
from jaxserve.steps.sampling.processors.processor import (
    Arrays,
    ChoiceProcessor,
    LogitsProcessor,
    Processor,
    Rows,
)
from jaxserve.steps.sampling.slot_sampling import SlotSampling
from jaxserve.steps.sampling.variants import Variant

_VOCAB_MULTIPLE = 256

# Name of a processor -> its `step_arrays`, [R, ...] each.
StepArrays = Mapping[str, Arrays]


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """What was chosen for each row.

    A row is not finite where its logits hold a NaN, +inf or nothing but -inf, or where nothing is
    left to choose from; such a row's other fields are zeros.

    Attributes:
      token: int32 [R].
      finite: bool [R].
      logprob: float32 [R]; None except in the FULL variant, like the two below.
      top_ids: int32 [R, MAX_LOGPROBS], the likeliest tokens.
      top_logprobs: float32 [R, MAX_LOGPROBS], -inf past the end of a smaller vocabulary.
    """

    token: jax.Array
    finite: jax.Array
    logprob: jax.Array | None = None
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None


def sample(
    logits: jax.Array,  # f32 [R, vocab]
    sampling: SlotSampling,  # of the R rows
    tokens: jax.Array,  # i32 [R, max_context]: prompt and output so far
    length: jax.Array,  # i32 [R]: valid tokens = position of the token to choose
    *,
    variant: Variant,
    step_arrays: StepArrays | None = None,
    processors: Sequence[Processor] = PROCESSORS,
) -> Sampled:
    """Choose one token a row. A row's choice depends on nothing outside the row.

    The semantics are those of `SamplingParams`. Can be called under jit and inside loops.

    Args:
      variant: serves every row's needs; static.
      step_arrays: arrays that come with this step alone, for the processors that take some; a
        processor whose arrays are missing is left out.
      processors: in the order of application; static.
    """
    token, largest = argmax(logits)
    # A maximum may pass over a NaN; a sum never does.
    finite = jnp.isfinite(largest) & ~jnp.isnan(jnp.sum(logits, axis=-1))
    if variant is not Variant.GREEDY:
        rows = Rows(tokens, length, sampling.prompt_length, sampling.stop_ids)
        active = _active(processors, sampling, step_arrays or {})
        edited = _padded(logits)
        if variant is Variant.FULL:
            for processor, arrays in active:
                if isinstance(processor, LogitsProcessor):
                    edited = processor.apply(edited, arrays, rows)
            token, largest = argmax(edited)
            finite &= jnp.isfinite(largest)
        choice = RandomChoice(largest[:, None] - edited, jnp.full_like(largest, jnp.inf))
        for processor, arrays in active:
            if isinstance(processor, ChoiceProcessor):
                choice = processor.apply(choice, arrays, rows)
        # Greedy rows are drawn too, and what is drawn is discarded.
        drawn = draw(choice, _random_bits(sampling.seed, length))
        token = jnp.where(sampling.is_random, drawn, token)
    token = jnp.where(finite, token, 0)
    if variant is not Variant.FULL:
        return Sampled(token, finite)
    normalizer = log_normalizer(logits)
    top_ids, top_logprobs = likeliest(logits, normalizer)
    return Sampled(
        token=token,
        finite=finite,
        logprob=jnp.where(finite, token_logprobs(logits, token, normalizer), 0.0),
        top_ids=jnp.where(finite[:, None], top_ids, 0),
        top_logprobs=jnp.where(finite[:, None], top_logprobs, 0.0),
    )


def _active(
    processors: Sequence[Processor], sampling: SlotSampling, step_arrays: StepArrays
) -> list[tuple[Processor, Arrays]]:
    """Return the processors with their arrays, without those whose `step_arrays` are missing."""
    return [
        (each, {**sampling.processors.get(each.name, {}), **step_arrays.get(each.name, {})})
        for each in processors
        if not each.step_arrays or each.name in step_arrays
    ]


def _padded(logits: jax.Array) -> jax.Array:
    """Pad the vocabulary once, so that the passes over it need not."""
    extra = -logits.shape[1] % _VOCAB_MULTIPLE
    return jnp.pad(logits, ((0, 0), (0, extra)), constant_values=-jnp.inf)


def _random_bits(seed: jax.Array, position: jax.Array) -> jax.Array:
    """Return uint32 [R], which depends on a row's seed and position only."""

    def bits(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.key(seed, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, position), dtype=jnp.uint32)

    return jax.vmap(bits)(seed, position)
