"""Proposals from a slot's own tokens, against a search in plain Python."""

import random

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.steps.proposals import look_up


def test_proposals_are_what_followed_the_longest_latest_match():
    rng = random.Random(0)
    look = jax.jit(look_up, static_argnums=2)
    num_found = 0
    for num in (1, 3, 8):
        # Few different tokens, so that matches of every length occur.
        tokens = np.array([[rng.randrange(3) for _ in range(24)] for _ in range(200)], np.int32)
        lengths = np.array([rng.randint(1, 24) for _ in tokens], np.int32)
        proposed, found = look(jnp.asarray(tokens), jnp.asarray(lengths), num)
        for row, length in enumerate(lengths):
            wanted = _search(tokens[row, :length].tolist(), num)
            assert bool(found[row]) == (wanted is not None)
            if wanted is not None:
                assert proposed[row].tolist() == wanted
                num_found += 1
    assert 300 < num_found < 590


def test_a_loop_is_proposed_without_end():
    tokens = jnp.array([[5, 1, 2, 3, 1, 2, 3, 1, 2, 0, 0, 0]], jnp.int32)
    proposed, found = look_up(tokens, jnp.array([9], jnp.int32), 7)
    assert found.all()
    assert proposed[0].tolist() == [3, 1, 2, 3, 1, 2, 3]


def _search(tokens: list[int], num: int) -> list[int] | None:
    """Return what followed the newest tokens before, repeated up to `num`; None without a match."""
    for size in (4, 3, 2):
        newest = tokens[-size:]
        if len(newest) < size:
            continue
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == newest:
                follow = tokens[end:]
                return [follow[i % len(follow)] for i in range(num)]
    return None
