"""Processors whose arrays come with a step: masks of allowed tokens, made up for this test."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.core.config import EngineConfig
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.scheduling.plan import Admission
from jaxserve.steps import slots as slot_edits
from jaxserve.steps.heads import mixed_head
from jaxserve.steps.sampling.processors import PROCESSORS
from jaxserve.steps.sampling.processors.processor import Arrays, LogitsProcessor, RowArray, Rows
from jaxserve.steps.sampling.sampler import sample
from jaxserve.steps.sampling.slot_sampling import pack_sampling
from jaxserve.steps.sampling.variants import SamplingNeeds, Variant
from jaxserve.testing.tiny import MAX_CONTEXT, VOCAB_SIZE, tiny_llama
from tests.steps.sampling import CONTEXT, NUM_ROWS, VOCAB, random_requests, request, run


class AllowedTokens(LogitsProcessor):
    """A processor that forbids tokens without a bit; bit t % 32 of word t // 32 is token t's."""

    name = "allowed_tokens"

    def __init__(self, vocab: int):
        self.step_arrays = {"mask": RowArray(np.uint32, 2**32 - 1, (-(-vocab // 32),))}

    def is_needed(self, params: SamplingParams) -> bool:
        """Return whether the made-up request sets min_tokens."""
        return params.min_tokens > 0

    def apply(self, logits: jax.Array, arrays: Arrays, rows: Rows) -> jax.Array:
        """See `LogitsProcessor`."""
        token = jnp.arange(logits.shape[1])
        word = jnp.minimum(token // 32, arrays["mask"].shape[1] - 1)
        bit = arrays["mask"][:, word] >> (token % 32).astype(jnp.uint32)
        return jnp.where(bit & 1 > 0, logits, -jnp.inf)

    def pack_masks(self, allowed: np.ndarray) -> np.ndarray:
        """Return the masks of bool [R, vocab], packed."""
        extra = -allowed.shape[1] % 32
        packed = np.packbits(np.pad(allowed, ((0, 0), (0, extra))), axis=1, bitorder="little")
        return packed.view(np.uint32)


@pytest.mark.parametrize("vocab", [97, VOCAB])
def test_only_allowed_tokens_are_chosen(vocab):
    """Greedy and random rows choose among the tokens of their own masks."""
    rng = np.random.default_rng(vocab)
    allowing = AllowedTokens(vocab)
    requests = [request(seed=i, temperature=i % 2) for i in range(NUM_ROWS)]
    logits = rng.normal(size=(NUM_ROWS, vocab)).astype(np.float32)
    allowed = rng.random((NUM_ROWS, vocab)) < 0.1
    allowed[:, 5] = True
    arrays = (
        logits,
        pack_sampling([(each, 0) for each in requests], NUM_ROWS),
        np.zeros((NUM_ROWS, CONTEXT), np.int32),
        np.ones(NUM_ROWS, np.int32),
    )
    step = jax.jit(partial(sample, variant=Variant.FULL, processors=(allowing, *PROCESSORS)))
    masks = {allowing.name: {"mask": allowing.pack_masks(allowed)}}
    token = np.asarray(step(*arrays, step_arrays=masks).token)
    assert allowed[np.arange(NUM_ROWS), token].all()
    best = np.where(allowed, logits, -np.inf).argmax(-1)
    np.testing.assert_array_equal(token[::2], best[::2])
    assert (token[1::2] != best[1::2]).any()
    none = {allowing.name: {"mask": allowing.pack_masks(np.zeros_like(allowed))}}
    assert not step(*arrays, step_arrays=none).finite.any()


def test_rows_without_a_mask_are_as_ever():
    """Neutral masks change no row, and neither does a step without masks."""
    rng = np.random.default_rng(2)
    allowing = AllowedTokens(VOCAB)
    requests = random_requests(rng, NUM_ROWS, VOCAB)
    logits = rng.normal(size=(NUM_ROWS, VOCAB)).astype(np.float32)
    wanted = run(logits, requests)
    arrays = (
        logits,
        pack_sampling([(each, 0) for each in requests], NUM_ROWS, (allowing, *PROCESSORS)),
        np.zeros((NUM_ROWS, CONTEXT), np.int32),
        np.ones(NUM_ROWS, np.int32),
    )
    step = jax.jit(partial(sample, variant=Variant.FULL, processors=(allowing, *PROCESSORS)))
    neutral = {name: array.full(NUM_ROWS) for name, array in allowing.step_arrays.items()}
    for step_arrays in (None, {allowing.name: neutral}):
        got = step(*arrays, step_arrays=step_arrays)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(x, y)


def test_it_is_needed_as_any_other():
    """The variant that edits logits serves requests that need it."""
    processors = (AllowedTokens(VOCAB),)
    assert SamplingNeeds.of(SamplingParams(min_tokens=1), processors).variant is Variant.FULL
    assert SamplingNeeds.of(SamplingParams(), processors).variant is Variant.GREEDY


def test_masks_reach_the_head_of_a_step():
    """The token that a mixed step appends to a slot is allowed by its row's mask."""
    config = EngineConfig(num_pages=9, max_slots=4, max_context=MAX_CONTEXT, max_step_tokens=64)
    allowing = AllowedTokens(VOCAB_SIZE)
    graphdef, params = nnx.split(tiny_llama())
    tokens = np.array([1, 2, 3], np.int32)
    admissions = [
        Admission(slot, request(seed=slot), 0, tokens, config.max_context) for slot in (0, 1)
    ]
    index, rows = slot_edits.pack_admissions(config, admissions)
    slots = jax.jit(slot_edits.admit)(slot_edits.empty_slots(config), index, rows)
    allowed = np.zeros((2, VOCAB_SIZE), np.bool_)
    allowed[[0, 1], [7, 96]] = True
    head = jax.jit(
        partial(
            mixed_head,
            graphdef=graphdef,
            config=config,
            probe=None,
            variant=Variant.FULL,
            processors=(allowing, *PROCESSORS),
        )
    )
    hidden = jax.random.normal(jax.random.key(0), (config.max_slots, 32))
    masks = {allowing.name: {"mask": allowing.pack_masks(allowed)}}
    slots, outputs = head(params, slots, hidden, np.array([1, 0]), None, None, masks)
    np.testing.assert_array_equal(outputs.tokens[:, 0], [7, 96])
    np.testing.assert_array_equal(slots.tokens[[1, 0], 3], [7, 96])
