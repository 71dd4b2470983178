"""Layers are measured with few points, go on after an interruption, and belong to their origin."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.core.errors import InvalidProfileError
from jaxserve.planning.layers import LayerProfile, measure_layers
from jaxserve.planning.layers import profile as parts
from jaxserve.planning.layers.measure import sample
from jaxserve.planning.layers.profile import Range, curve
from tests.common.tiers import some
from tests.planning.layers.made_up import MadeUpTimer, made_up_profile

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


QUIET = {"progress": False, "tolerance": 0.2}


def test_straight_curves_have_three_points():
    """Only prompts, which cost with their square, have more; the total is exact."""
    timer = MadeUpTimer()
    profile = measure_layers(timer, made_up_profile(), **QUIET)
    straight = [parts.REST, parts.DECODE, parts.HEAD, parts.HANDOFF, parts.HANDOVER, parts.BUSY]
    for part in straight:
        assert len(profile.seconds[curve(part, 1)]) == 3, part
    assert len(profile.seconds[curve(parts.LAUNCH, 2)]) == 1
    assert len(profile.seconds[curve(parts.PROMPT, 1)]) > 3
    assert [name for name in profile.seconds if name.startswith("decode ")] == [
        f"decode {batch}@{degree}" for degree in (1, 2) for batch in (1, 4, 16)
    ]
    # A decoding batch at the longest length is measured once, for both of its curves.
    shared = 6
    assert len(timer.asked) == profile.num_points - shared
    assert profile.degrees == (1, 2) and profile.is_complete


@pytest.mark.parametrize("num_points", [0, 1, 7, 30])
def test_an_interrupted_measurement_goes_on(tmp_path, num_points):
    """Saved points are not measured again, and the result is that of one measurement."""
    path = tmp_path / "deep" / "layers.json"
    whole = measure_layers(MadeUpTimer(), made_up_profile(), **QUIET)
    with pytest.raises(KeyboardInterrupt):
        measure_layers(MadeUpTimer(fails_after=num_points), made_up_profile(path), **QUIET)
    assert path.exists() == (num_points > 0)
    found = LayerProfile.load(path) if num_points else made_up_profile(path)
    assert found.num_points >= num_points and not found.is_complete
    timer = MadeUpTimer()
    resumed = measure_layers(timer, found, **QUIET)
    assert resumed.seconds == whole.seconds
    once = MadeUpTimer()
    measure_layers(once, made_up_profile(), **QUIET)
    assert len(timer.asked) == len(once.asked) - num_points
    again = LayerProfile.load(path)
    assert again.seconds == whole.seconds and again.is_complete
    nothing = MadeUpTimer(fails_after=0)
    measure_layers(nothing, again, **QUIET)


def test_time_is_shared_out_over_the_degrees():
    """When the time is over, a degree that was begun has its ends, and later ones are left out."""
    timer = MadeUpTimer(degrees=(1, 2, 4))
    profile = made_up_profile()
    measure_layers(
        timer, profile, progress=False, tolerance=0.0, budget_s=25.0, now=lambda: len(timer.asked)
    )
    in_time = set(profile.degrees)
    assert {1} <= in_time < {1, 2, 4} and not profile.is_complete
    # The next call has time for what is missing, and the ends of the rest are measured.
    measure_layers(timer, profile, progress=False, tolerance=1.0, budget_s=1e9, now=lambda: 0.0)
    assert profile.degrees == (1, 2, 4) and profile.is_complete


def test_a_profile_of_something_else_is_refused(tmp_path):
    """Another device, model or version of JAX is named."""
    path = tmp_path / "layers.json"
    profile = measure_layers(MadeUpTimer((1,)), made_up_profile(path), **QUIET)
    assert LayerProfile.load(path, expected=profile.origin).seconds == profile.seconds
    other = made_up_profile(kind="slide rule").origin
    with pytest.raises(InvalidProfileError, match="device.kind is 'abacus', not 'slide rule'"):
        LayerProfile.load(path, expected=other)
    for part in ("model", "versions", "sizes"):
        changed = replace(profile.origin, **{part: {"made": "anew"}})
        with pytest.raises(InvalidProfileError, match=f"{part}.made is None, not 'anew'"):
            LayerProfile.load(path, expected=changed)


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: "",
        lambda whole: json.dumps(whole)[:-20],
        lambda whole: "[]",
        lambda whole: json.dumps({"origin": whole["origin"]}),
        lambda whole: json.dumps({**whole, "seconds": {"rest@1": {"one": 1.0}}}),
        lambda whole: json.dumps({**whole, "seconds": {"rest@1": {"1": -1.0}}}),
        lambda whole: json.dumps({**whole, "seconds": {"rest@1": {"1": None}}}),
        lambda whole: json.dumps({**whole, "seconds": {"rest": {"1": 1.0}}}),
        lambda whole: json.dumps({**whole, "origin": {}}),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damage):
    """A file that is cut off or has other contents is refused with a typed error."""
    path = tmp_path / "layers.json"
    measure_layers(MadeUpTimer((1,)), made_up_profile(path), **QUIET)
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(InvalidProfileError, match="does not hold measured layers"):
        LayerProfile.load(path)
    with pytest.raises(InvalidProfileError):
        LayerProfile.load(tmp_path / "none")
