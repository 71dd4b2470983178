"""The soak in short: many threads, every kind of end, faults, and a pool that is resized."""

from __future__ import annotations

import random

import pytest

from scripts.soak import soak

pytestmark = pytest.mark.release


def test_nothing_leaks_and_every_request_ends_once():
    """600 requests of eight threads; the seed is printed."""
    seed = random.randrange(10**6)
    print("seed", seed)
    figures = soak(600, 8, seed)
    assert not figures["problems"], figures
    assert figures["num_requests"] == sum(figures["ends"].values()) == 600
    assert {"stop", "length", "cancelled", "streamed", "turns"} & figures["ends"].keys()
    assert figures["num_resizes"] > 2
