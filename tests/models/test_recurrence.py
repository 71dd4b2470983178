"""Rows of any length advance the sequences of their slots as token by token, whatever the batch."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import Rows
from jaxserve.models.recurrence import advance_rows, advance_whole
from tests.common.tiers import some

SLOTS, WIDTH, TOKENS = 5, 3, 40


def _advance(state, inputs, count):
    """A recurrence in which the order of tokens matters: h becomes 0.5 h + x + h[0] x."""

    def one(h, each):
        x, is_there = each
        new = 0.5 * h + x + h[0] * x
        return jnp.where(is_there, new, h), 2.0 * new

    is_there = jnp.arange(inputs["x"].shape[0]) < count
    h, out = jax.lax.scan(one, state["h"], (inputs["x"], is_there))
    return out, {"h": h}


def _expected(h: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    outputs = []
    for each in x:
        h = 0.5 * h + each + h[0] * each
        outputs.append(2 * h)
    return h, np.array(outputs)


def _rows(lengths: list[int], first: list[int]) -> Rows:
    length, position = np.zeros((2, SLOTS), np.int32)
    length[: len(lengths)], position[: len(first)] = lengths, first
    start = np.where(length > 0, np.cumsum(length) - length, 0).astype(np.int32)
    table = np.zeros((SLOTS, 1), np.int32)
    return Rows(*map(jnp.asarray, (start, length, position, position + length, table)))


@pytest.mark.parametrize("seed", some(range(3)))
@pytest.mark.parametrize("most", [None, 1, 9])
@pytest.mark.parametrize("in_turn", [False, True])
def test_rows_advance_their_slots(seed, most, in_turn):
    """Outputs and states are those of token by token; other slots, and padding, have no effect."""
    rng = np.random.default_rng(seed)
    longest = int(rng.integers(5, 12))
    lengths = {None: [longest, 1, 17, 0], 1: [1, 1, 0, 1], 9: [longest - 3, 1, 9, 0]}[most]
    slots = rng.permutation(SLOTS)[: len(lengths)].tolist()
    first = [0 if i == seed else int(rng.integers(1, 9)) for i in range(len(lengths))]
    states = rng.normal(size=(2, SLOTS, WIDTH)).astype(np.float32)
    states[1, slots[seed % len(lengths)] if first[seed] == 0 else slots[0]] += 100
    x = rng.normal(scale=0.3, size=(TOKENS, WIDTH)).astype(np.float32)
    x[sum(lengths) :] = np.nan
    rows = _rows(lengths, first)
    slot = jnp.asarray([*slots, *[0] * (SLOTS - len(slots))], jnp.int32)

    @partial(jax.jit, static_argnames="writes")
    def advanced(states, *, writes):
        return advance_rows(
            _advance,
            {"x": jnp.asarray(x)},
            {"h": states},
            jnp.int32(1),
            slot,
            rows,
            most=most,
            writes=writes,
            longest=4,
            in_turn=in_turn,
        )

    got, new = advanced(jnp.asarray(states), writes=True)
    wanted = states.copy()
    at = 0
    for length, own, position in zip(lengths, slots, first, strict=True):
        if not length:
            continue
        begin = np.zeros(WIDTH, np.float32) if position == 0 else states[1, own]
        wanted[1, own], outputs = _expected(begin, x[at : at + length])
        np.testing.assert_allclose(got[at : at + length], outputs, rtol=1e-4, atol=1e-4)
        at += length
    np.testing.assert_array_equal(got[at:], 0)
    np.testing.assert_allclose(new["h"], wanted, rtol=1e-4, atol=1e-4)
    if most is not None:
        same, old = advanced(jnp.asarray(states), writes=False)
        np.testing.assert_array_equal(same, got)
        np.testing.assert_array_equal(old["h"], states)


@pytest.mark.parametrize("lengths", some([[12, 5], [12, 1, 1, 0, 1], [1] * 5], 1))
def test_a_mixed_batch_advances_its_rows_alone(lengths):
    """Slots without a row of one token cost nothing: such rows are compacted into groups."""
    calls = []

    def counted(state, inputs, count):
        if inputs["x"].shape[0] == 1:
            jax.debug.callback(lambda count: calls.append(int(count)), count)
        return _advance(state, inputs, count)

    rng = np.random.default_rng(0)
    x = rng.normal(scale=0.3, size=(TOKENS, WIDTH)).astype(np.float32)
    states = rng.normal(size=(1, SLOTS, WIDTH)).astype(np.float32)
    slots = rng.permutation(SLOTS)
    rows = _rows(lengths, [3] * SLOTS)

    @jax.jit
    def advanced(states):
        return advance_rows(
            counted,
            {"x": jnp.asarray(x)},
            {"h": states},
            0,
            jnp.asarray(slots),
            rows,
            longest=4,
            group=2,
            in_turn=False,
        )

    got, new = jax.block_until_ready(advanced(jnp.asarray(states)))
    jax.effects_barrier()
    num_single = lengths.count(1)
    assert sum(calls) == num_single and len(calls) == 2 * -(-num_single // 2)
    wanted, at = states.copy(), 0
    for length, slot in zip(lengths, slots, strict=False):
        if length:
            wanted[0, slot], outputs = _expected(states[0, slot], x[at : at + length])
            np.testing.assert_allclose(got[at : at + length], outputs, rtol=1e-4, atol=1e-4)
        at += length
    np.testing.assert_allclose(new["h"], wanted, rtol=1e-4, atol=1e-4)


def test_whole_sequences_are_those_of_token_by_token():
    """Sequences whose length is not a multiple of a piece begin with zeros, each on its own."""
    x = np.random.default_rng(0).normal(scale=0.3, size=(2, 11, WIDTH)).astype(np.float32)
    arrays = {"h": ((WIDTH,), jnp.float32)}
    flat = {"x": jnp.asarray(x.reshape(-1, WIDTH))}
    got = advance_whole(_advance, flat, 11, arrays, longest=4)
    wanted = [_expected(np.zeros(WIDTH), each)[1] for each in x]
    np.testing.assert_allclose(got.reshape(2, 11, WIDTH), wanted, rtol=1e-4, atol=1e-4)
