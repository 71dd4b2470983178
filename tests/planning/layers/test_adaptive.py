"""Curves get as many points as their bends ask for."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.planning.layers.adaptive import Range, sample
from tests.common.tiers import some

pytestmark = pytest.mark.fast


def _step(at: int) -> float:
    """Flat up to 100, then rising."""
    return 1.0 if at <= 100 else at / 100


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        (lambda at: 2.0 + 3.0 * at, [1, 32, 1024]),
        (lambda at: 5.0, [1, 32, 1024]),
        (lambda at: 0.0, [1, 32, 1024]),
        (_step, [1, 6, 32, 49, 76, 94, 117, 146, 181, 431, 1024]),
    ],
    ids=["line", "constant", "zero", "knee"],
)
def test_a_curve_gets_few_points_where_it_is_straight(curve, expected):
    """A straight curve has three points; one with a knee has the others around the knee."""
    found = sample([Range("x", 1, 1024)], lambda _, at: curve(at), tolerance=0.05)
    assert list(found["x"]) == expected


@pytest.mark.parametrize("seed", some(range(5)))
def test_interpolation_keeps_the_tolerance_on_smooth_curves(seed):
    """Between the points of a smooth curve, the line is within about the tolerance."""
    rng = np.random.default_rng(seed)
    power, scale = rng.uniform(0.3, 2.5), rng.uniform(1.0, 300.0)

    def curve(at: float) -> float:
        return 1.0 + (at / scale) ** power

    found = sample([Range("x", 1, 4096)], lambda _, at: curve(at), tolerance=0.02)["x"]
    at = np.arange(1, 4097)
    line = np.interp(at, list(found), list(found.values()))
    true = np.array([curve(float(x)) for x in at])
    assert np.abs(line / true - 1).max() < 0.04, seed
    assert 3 <= len(found) < 40


def test_the_worst_curve_is_refined_first():
    """When the time is over, all ends and middles are there, and the largest errors are smaller."""
    asked: list[tuple[str, int]] = []

    def measure(name: str, at: int) -> float:
        asked.append((name, at))
        return float(at**2 if name == "bent" else at)

    found = sample(
        [Range("straight", 1, 256), Range("bent", 1, 256)],
        measure,
        tolerance=0.01,
        goes_on=lambda: len(asked) < 8,
    )
    assert asked[:4] == [("straight", 1), ("straight", 256), ("bent", 1), ("bent", 256)]
    assert list(found["straight"]) == [1, 16, 256]
    assert len(found["bent"]) == 5 and len(asked) == 8


def test_narrow_ranges_have_no_middle():
    """One point, or two that are close, are measured once each."""
    asked: list[int] = []

    def measure(_: str, at: int) -> float:
        asked.append(at)
        return float(at)

    found = sample([Range("one", 4, 4), Range("two", 4, 5)], measure, tolerance=0.0)
    assert found == {"one": {4: 4.0}, "two": {4: 4.0, 5: 5.0}}
    assert asked == [4, 4, 5]


def test_noise_of_small_values_asks_for_nothing():
    """A curve that is jagged far below the least value is not refined."""
    jagged = {1: 1e-4, 16: 3e-4, 256: 1e-4}
    found = sample([Range("x", 1, 256)], lambda _, at: jagged[at], tolerance=0.1, least=1e-2)
    assert list(found["x"]) == [1, 16, 256]
