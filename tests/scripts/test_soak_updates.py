"""The soak of weight updates in short: all ways of updates, while requests run."""

from __future__ import annotations

import random

import pytest

from scripts.soak_updates import NUM_SETS, Compilations, soak_updates

pytestmark = pytest.mark.release


def test_thirty_updates_mix_nothing_and_compile_nothing():
    """Tokens are of their versions, and requests have several of them; the seed is printed."""
    seed = random.randrange(10**6)
    print("seed", seed)
    figures = soak_updates(30, seed)
    assert not figures["problems"], figures
    assert 30 <= figures["num_updates"] <= 31  # the last one may be of two parts
    assert figures["ways"].keys() > {"keep", "restart", "prepare", "in_parts", "stale", "refused"}
    assert figures["num_requests_of_several_versions"] > 10 and figures["num_prefix_hit"] > 0
    assert figures["num_tokens"] > 30 * NUM_SETS and figures["num_wrong_tokens"] == 0
    assert len(figures["resident_bytes"]) == 10 and min(figures["resident_bytes"]) > 1 << 20


def test_a_compilation_is_counted():
    """The soak's zero means something: a new function counts once, and a known one does not."""
    import jax
    import jax.numpy as jnp

    ones = jnp.ones(3)
    function = jax.jit(lambda x: x * 2 + random.random())
    with Compilations() as compilations:
        function(ones)
        function(ones)
    assert compilations.count == 1
    function(jnp.ones(4))
    assert compilations.count == 1
