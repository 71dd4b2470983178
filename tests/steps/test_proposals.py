"""What is proposed to follow the newest tokens of a slot."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.steps import proposals, slots
from jaxserve.steps.decode import block_of, choose, rows_of
from jaxserve.steps.outputs import no_outputs
from jaxserve.steps.packing import DecodeWindow
from jaxserve.steps.proposals import Answers, Draft, Lookup
from jaxserve.steps.sampling.sampler import Variant
from jaxserve.steps.slots import SlotState

NUM, CONTEXT, NUM_SLOTS = 5, 500, 4
CONFIG = EngineConfig(num_pages=9, max_slots=NUM_SLOTS, max_context=CONTEXT, num_proposed=NUM)

_append, _remember = jax.jit(slots.append), jax.jit(slots.remember)
_admit = jax.jit(slots.admit)
_look_up = jax.jit(proposals.look_up, static_argnames="num")
_propose = jax.jit(proposals.propose, static_argnames="num")


def _with(
    state: SlotState, texts: Mapping[int, Sequence[int]], max_length: int = CONTEXT
) -> SlotState:
    """Return the slots after sequences of these tokens were admitted, by slot."""
    tokens = np.zeros(slots.ADMISSIONS_A_CALL * CONTEXT, np.int32)
    index = np.full(slots.ADMISSIONS_A_CALL, NUM_SLOTS, np.int32)
    start, length = np.full_like(index, 10**6), np.zeros_like(index)
    used = 0
    for i, (slot, text) in enumerate(texts.items()):
        index[i], start[i], length[i] = slot, used, len(text)
        tokens[used : used + len(text)] = text
        used += len(text)
    sampling = jax.tree.map(
        lambda leaf: jnp.zeros((len(index), *leaf.shape[1:]), leaf.dtype), state.sampling
    )
    arrays = index, start, length, np.full_like(index, max_length)
    admitted = slots.Admitted(*arrays, sampling, None, None)
    return _admit(state, admitted, tokens)


def _proposed(state: SlotState, slot: int) -> list[int]:
    index = jnp.array([slot])
    found, available, _ = _look_up(
        state.lookup, state.answers, state.tokens, index, state.length[index], num=NUM
    )
    return found[0, : int(available[0])].tolist()


def _expected(text: Sequence[int]) -> list[int]:
    """Return what followed the longest of the newest 8, 4, 2 and 1 tokens, the last time."""
    for order in (8, 4, 2, 1):
        for place in range(len(text) - 1, order - 1, -1):
            if list(text[place - order : place]) == list(text[len(text) - order :]):
                later = text[place:]
                return [later[i % len(later)] for i in range(NUM)]
    return []


def test_what_followed_the_longest_match_is_proposed():
    """In sequences that were admitted, that grow, and whose slot served others before."""
    rng, state = random.Random(0), slots.empty_slots(CONFIG)
    num_found = num_equal = 0
    for _ in range(6):
        size = rng.choice([2, 3, 8])
        texts = {
            slot: [rng.randrange(size) for _ in range(rng.randint(1, 25))] for slot in (3, 0, 2)
        }
        state = _with(state, texts)
        for _ in range(8):
            for slot, text in texts.items():
                proposed, expected = _proposed(state, slot), _expected(text)
                assert not proposed or [text[-1], proposed[0]] in map(list, pairwise(text))
                num_found += bool(expected)
                num_equal += bool(expected) and proposed == expected
            new = {slot: rng.randrange(size) for slot in texts}
            index, live = jnp.array(list(texts)), jnp.ones(3, jnp.bool_)
            state = _append(state, index, live, jnp.array(list(new.values())), live)
            for slot, token in new.items():
                texts[slot].append(token)
    # Some entries are overwritten by others of the same hash.
    assert num_equal > 0.95 * num_found > 100


def test_answers_of_other_requests_are_looked_up_behind_own_tokens():
    """Up to their end; of equally long matches the sequence's own one counts."""
    state = _with(slots.empty_slots(CONFIG), {1: [5, 6, 7, 8, 9]})
    state = _with(_remember(state, jnp.int32(1)), {2: [30, 6, 7]})
    assert _proposed(state, 2) == [8, 9]
    assert _proposed(jax.jit(slots.forget_answers)(state), 2) == []
    state = _with(state, {2: [6, 7, 20, 6, 7]})
    assert _proposed(state, 2)[:1] == [20]
    state = _with(state, {2: [7, 20, 6, 7]})  # two tokens of the answer, one of its own
    assert _proposed(state, 2) == [8, 9]


@pytest.mark.release
def test_the_oldest_answers_make_way_for_the_newest():
    answers = Answers.empty(CONTEXT)
    answers = replace(answers, tokens=answers.tokens[:100])
    remember = jax.jit(Answers.remember)
    for first in range(0, 2000, 20):
        text = jnp.zeros(CONTEXT, jnp.int32).at[:20].set(jnp.arange(first, first + 20))
        answers = remember(answers, text, jnp.int32(0), jnp.int32(20))
    tokens = answers.tokens.tolist()
    assert {*range(1980, 2000)} <= {*tokens} and not {*range(1800)} & {*tokens}
    lookup = Lookup.empty(1, CONTEXT)
    text = jnp.zeros((1, CONTEXT), jnp.int32).at[0, :2].set(jnp.array([1990, 1991]))
    found, available, _ = _look_up(lookup, answers, text, jnp.array([0]), jnp.array([2]), num=NUM)
    assert found[0].tolist() == [1992, 1993, 1994, 1995, 1996] and available.tolist() == [NUM]


@pytest.mark.release
def test_rows_share_the_proposals_by_their_chances():
    """Those of a row that was right before come first, and none pass a row's room."""
    state = _with(slots.empty_slots(CONFIG), {0: [1, 2, 3, 1, 2], 1: [4, 5, 6, 4, 5], 2: [7, 8]})
    assert state.lookup is not None and state.answers is not None
    slot, source = jnp.array([0, 1, 2]), jnp.array([4, 4, 4])
    rates, total = state.lookup.rates, state.answers.rates
    for _ in range(20):
        counts = jnp.array([3, 0, 0]), jnp.array([0, 1, 0])
        rates, total = proposals.learn(rates, total, slot, source, *counts)
    lookup = replace(state.lookup, rates=rates)

    def propose(room: list[int], cost: float) -> proposals.Draft:
        arrays = state.tokens, slot, state.length[slot], jnp.array(room)
        return _propose(lookup, state.answers, *arrays, jnp.float32(cost), num=NUM)

    draft = propose([9, 9, 9], 1.2)
    assert draft.available.tolist() == [5, 5, 0] and draft.num.tolist() == [5, 0, 0]
    assert bool(draft.is_worth) and not bool(propose([9, 9, 9], 4.0).is_worth)
    assert propose([3, 9, 9], 1.2).num.tolist() == [2, 3, 0]
    assert propose([0, 9, 9], 1.2).num.tolist() == [0, 5, 0]
    assert not bool(propose([1, 1, 1], 1.0).is_worth)


def test_a_new_slot_expects_what_others_have_seen():
    state = slots.empty_slots(CONFIG)
    assert state.lookup is not None and state.answers is not None
    rates, total = state.lookup.rates, state.answers.rates
    for _ in range(200):
        counts = jnp.array([1, 0]), jnp.array([0, 1])
        rates, total = proposals.learn(rates, total, jnp.array([0, 1]), jnp.array([2, 4]), *counts)
    state = _with(replace(state, answers=replace(state.answers, rates=total)), {3: [1, 2]})
    assert state.lookup is not None
    hits, misses = state.lookup.rates[3].T
    assert hits[2] > 1.7 and misses[4] > 1.7 and hits[0] == misses[0] == 1.0
    np.testing.assert_allclose(hits + misses, 2.0, rtol=1e-6)


def test_no_token_follows_the_end():
    """Of proposals that are all right, those behind a sequence's last token are not appended."""
    text, num_left = [5, 6, 7], 2
    state = _with(slots.empty_slots(CONFIG), {0: text}, max_length=len(text) + num_left)
    window = DecodeWindow(jnp.int32(0), jnp.int32(1), jnp.array([NUM + 1]), jnp.float32(1))
    rows = rows_of(state, window)
    proposed = jnp.array([NUM])
    tokens = jnp.arange(1, NUM + 1)[None]
    draft = Draft(tokens, proposed, proposed, jnp.array([0]), jnp.bool_(True))
    live = rows.live(state.done)
    block = block_of(live, proposed, NUM)
    logits = jax.nn.one_hot(jnp.arange(1, NUM + 2), 9)
    choice = choose(
        logits,
        rows,
        block,
        state,
        no_outputs(1, NUM + 1, Variant.GREEDY, num_proposed=NUM),
        live,
        draft,
        proposed,
        looks_up=False,
        variant=Variant.GREEDY,
        config=CONFIG,
    )
    assert bool(choice.slots.done[0])
    assert choice.outputs.num_tokens.tolist() == [num_left]
    assert choice.slots.tokens[0, : len(text) + num_left].tolist() == [*text, 1, 2]
