"""Masks of allowed tokens, which come with a step."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

from jaxserve.core.config import EngineConfig
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.scheduling.plan import Admission
from jaxserve.steps import slots as slot_edits
from jaxserve.steps.heads import mixed_head
from jaxserve.steps.packing import no_masks
from jaxserve.steps.sampling.processors import AllowedTokens
from jaxserve.steps.sampling.sampler import SamplingNeeds, Variant, pack_sampling, sample
from jaxserve.testing.tiny import MAX_CONTEXT, VOCAB_SIZE, tiny_llama
from tests.common.tiers import some
from tests.steps.sampling import CONTEXT, NUM_ROWS, VOCAB, random_requests, request, run


def _words(allowed: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """Return the step arrays of bool [R, vocab]."""
    extra = -allowed.shape[1] % 32
    packed = np.packbits(np.pad(allowed, ((0, 0), (0, extra))), axis=1, bitorder="little")
    return {AllowedTokens.name: {"words": packed.view(np.uint32)}}


@pytest.mark.parametrize("variant", Variant)
@pytest.mark.parametrize("vocab", some([97, VOCAB]))
def test_only_allowed_tokens_are_chosen(vocab, variant):
    """Greedy and random rows choose among the tokens of their own masks."""
    rng = np.random.default_rng(vocab)
    is_greedy = variant is Variant.GREEDY
    requests = [request(seed=i, temperature=0 if is_greedy else i % 2) for i in range(NUM_ROWS)]
    logits = rng.normal(size=(NUM_ROWS, vocab)).astype(np.float32)
    allowed = rng.random((NUM_ROWS, vocab)) < 0.1
    allowed[:, 5] = True
    arrays = (
        logits,
        pack_sampling([(each, 0) for each in requests], NUM_ROWS),
        np.zeros((NUM_ROWS, CONTEXT), np.int32),
        np.ones(NUM_ROWS, np.int32),
    )
    step = jax.jit(partial(sample, variant=variant))
    token = np.asarray(step(*arrays, step_arrays=_words(allowed)).token)
    assert allowed[np.arange(NUM_ROWS), token].all()
    best = np.where(allowed, logits, -np.inf).argmax(-1)
    np.testing.assert_array_equal(token[::2], best[::2])
    assert (token[1::2] != best[1::2]).any() != is_greedy
    assert not step(*arrays, step_arrays=_words(np.zeros_like(allowed))).finite.any()


def test_rows_without_a_mask_are_as_ever():
    """Neutral masks change no row, and neither does a step without masks."""
    rng = np.random.default_rng(2)
    requests = random_requests(rng, NUM_ROWS, VOCAB)
    logits = rng.normal(size=(NUM_ROWS, VOCAB)).astype(np.float32)
    wanted = run(logits, requests)
    arrays = (
        logits,
        pack_sampling([(each, 0) for each in requests], NUM_ROWS),
        np.zeros((NUM_ROWS, CONTEXT), np.int32),
        np.ones(NUM_ROWS, np.int32),
    )
    step = jax.jit(partial(sample, variant=Variant.FULL))
    for step_arrays in (None, no_masks(NUM_ROWS, VOCAB)):
        got = step(*arrays, step_arrays=step_arrays)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(x, y)


def test_it_is_needed_as_any_other():
    """Every variant serves a grammar; FULL one with what only FULL serves."""
    assert SamplingNeeds.of(SamplingParams(regex="a", temperature=0)).variant is Variant.GREEDY
    assert SamplingNeeds.of(SamplingParams(regex="a", temperature=1)).variant is Variant.RANDOM
    assert SamplingNeeds.of(SamplingParams(regex="a", logprobs=0)).variant is Variant.FULL
    assert (
        SamplingNeeds.of(SamplingParams(regex="a", temperature=1, top_k=2)).variant
        is Variant.RANDOM
    )
    assert SamplingNeeds.of(SamplingParams()).variant is Variant.GREEDY


def test_masks_reach_the_head_of_a_step():
    """The token that a mixed step appends to a slot is allowed by its row's mask."""
    config = EngineConfig(num_pages=9, max_slots=4, max_context=MAX_CONTEXT, max_step_tokens=64)
    graphdef, params = nnx.split(tiny_llama())
    tokens = np.array([1, 2, 3], np.int32)
    admissions = [
        Admission(slot, request(seed=slot), 0, tokens, config.max_context) for slot in (0, 1)
    ]
    admitted = slot_edits.pack_admissions(config, admissions)
    slots = jax.jit(slot_edits.admit)(slot_edits.empty_slots(config), *admitted)
    allowed = np.zeros((2, VOCAB_SIZE), np.bool_)
    allowed[[0, 1], [7, 96]] = True
    head = jax.jit(
        partial(mixed_head, graphdef=graphdef, config=config, probe=None, variant=Variant.FULL)
    )
    hidden = jax.random.normal(jax.random.key(0), (config.max_slots, 32))
    masks = _words(allowed)
    slots, outputs, _ = head(params, slots, hidden, np.array([1, 0]), None, None, masks)
    np.testing.assert_array_equal(outputs.tokens[:, 0], [7, 96])
    np.testing.assert_array_equal(slots.tokens[[1, 0], 3], [7, 96])
