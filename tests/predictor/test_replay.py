"""The replay buffer is bounded, prefers mispredictions, and is deterministic for a seed."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.predictor.online import Observation, ReplayBuffer, pack, unpack

pytestmark = pytest.mark.fast


def _observed(number: int, *, wrong: bool) -> Observation:
    return Observation(np.arange(number % 5 + 1, dtype=np.int32), number + 1, 1, 0 if wrong else 1)


def _filled(num: int, capacity: int, seed: int = 0) -> ReplayBuffer:
    """Return a buffer in which every other prediction was wrong."""
    buffer, random = ReplayBuffer(capacity, favour=3.0), np.random.default_rng(seed)
    for number in range(num):
        buffer.add(_observed(number, wrong=number % 2 == 0), random)
    return buffer


def _share_wrong(observations) -> float:
    return float(np.mean([one.is_wrong for one in observations]))


def test_it_is_bounded_and_lets_the_oldest_go():
    """Its size is at most the capacity; all of the newest mispredictions are in it."""
    buffer = _filled(1000, 60)
    assert len(buffer) == 60
    lengths = [one.length for one in buffer]
    assert lengths == sorted(lengths)
    assert {n + 1 for n in range(920, 1000, 2)} <= set(lengths)


def test_mistakes_are_favoured_in_keeping_and_in_sampling():
    """Half of the observations are wrong, 3/4 of the buffer, and 9/10 of the draws."""
    buffer = _filled(10_000, 1000)
    assert _share_wrong(buffer) == pytest.approx(3 / 4, abs=0.04)
    drawn = buffer.sample(5000, np.random.default_rng(1))
    assert _share_wrong(drawn) == pytest.approx(9 / 10, abs=0.03)


def test_the_same_seed_the_same_observations():
    """Contents and draws depend only on the seed."""

    def lengths(seed: int) -> list[int]:
        buffer = _filled(500, 50, seed)
        return [one.length for one in buffer.sample(20, np.random.default_rng(seed))]

    assert lengths(3) == lengths(3) != lengths(4)


@pytest.mark.parametrize("num", [0, 1, 70])
def test_packed_and_unpacked(num):
    """The observations are equal after a round trip through arrays, also for an empty buffer."""
    kept = list(_filled(num, 100))
    again = unpack(pack(kept, "x"), "x")
    assert len(again) == len(kept)
    for one, other in zip(kept, again, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        assert (one.length, one.bucket, one.predicted) == (
            other.length,
            other.bucket,
            other.predicted,
        )


def test_bounds_that_make_no_sense():
    """The error has the given value."""
    with pytest.raises(ValueError, match="capacity=0"):
        ReplayBuffer(0)
    with pytest.raises(ValueError, match="favour=0.5"):
        ReplayBuffer(5, favour=0.5)
