"""Step times in a folder are found by their origin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.planning.step_times import (
    GroupTimes,
    StepTimes,
    differences,
    find_times,
    keep_times,
)
from tests.planning.step_times import made_up

pytestmark = pytest.mark.fast


def test_step_times_are_found_by_their_origin(tmp_path: Path):
    """Those of another device and damaged files are passed over; the newest of an origin counts."""
    times = made_up()
    assert find_times(StepTimes, tmp_path / "missing", times.origin) is None
    other = replace(times, origin=replace(times.origin, device={"platform": "an abacus"}))
    assert keep_times(tmp_path, other) != keep_times(tmp_path, times)
    (tmp_path / "steps-damaged.json").write_text("{")
    assert _found(tmp_path, times) == times
    assert _found(tmp_path, other) == other
    newer = replace(times, edit_s=0.75)
    keep_times(tmp_path, newer)
    assert _found(tmp_path, times) == newer
    third = replace(times.origin, device={"platform": "a slide rule"})
    assert find_times(StepTimes, tmp_path, third) is None


def test_another_pool_is_no_other_origin_and_another_version_is(tmp_path: Path):
    """Step times hold for any size of the page pool, not for what another JAX compiles."""
    times = made_up()
    keep_times(tmp_path, times)
    same = replace(times.origin, config=replace(times.origin.config, num_pages=77))
    assert find_times(StepTimes, tmp_path, same) is not None
    other = replace(same, versions={"jax": "1"})
    assert find_times(StepTimes, tmp_path, other) is None
    assert differences(other, times.origin) == ["version.jax is '1', not '0'"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("attention", "reference"), ("row_kernels", "loop"), ("max_decode_iterations", 3)],
)
def test_steps_of_other_kernels_or_loops_are_another_origin(tmp_path: Path, name: str, value: Any):
    """What an option changes in the compiled steps changes their times."""
    times = made_up()
    keep_times(tmp_path, times)
    other = replace(times.origin, config=replace(times.origin.config, **{name: value}))
    assert find_times(StepTimes, tmp_path, other) is None
    [difference] = differences(other, times.origin)
    assert difference.startswith(f"{name} is {value!r}")


def test_times_of_two_groups_are_found_by_the_origins_of_both(tmp_path: Path):
    """They are files of their own: neither kind is taken for the other."""
    times = made_up()
    two = replace(times, origin=times.origin.on(2))
    groups = GroupTimes(groups=(times, two), handover_s=0.5, page_s=0.25)
    keep_times(tmp_path, times)
    origins = [times.origin, two.origin]
    assert find_times(GroupTimes, tmp_path, origins) is None
    keep_times(tmp_path, groups)
    assert keep_times(tmp_path, replace(groups, page_s=0.75)).is_file()
    found = find_times(GroupTimes, tmp_path, origins)
    assert found is not None and found.page_s == 0.75
    assert find_times(GroupTimes, tmp_path, origins[::-1]) is None
    assert find_times(StepTimes, tmp_path, two.origin) is None


def _found(folder: Path, times: StepTimes) -> StepTimes:
    """Return what is found for the origin of `times`, with that origin: JSON has no tuples."""
    found = find_times(StepTimes, folder, times.origin)
    assert found is not None
    return replace(found, origin=times.origin)
