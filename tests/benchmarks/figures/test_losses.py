"""The losses of policies by predicted length, compared with numbers computed by hand."""

from __future__ import annotations

import pytest

from benchmarks.common.repeats import Spread
from benchmarks.figures.render import behind_by, losses

pytestmark = pytest.mark.release


def _spreads(**values: list[float]) -> dict[str, Spread]:
    return {policy: Spread.of(runs) for policy, runs in values.items()}


def test_shares_are_of_the_medians():
    """80 of 100 is 20 % less, 120 ms against 100 ms is 20 % more, and a lead is not a loss."""
    low, high = Spread.of([70.0, 80.0, 95.0]), Spread.of([100.0])
    assert behind_by(low, high) == 1 - 80 / 100
    assert behind_by(high, low) is None
    assert behind_by(Spread.of([120.0]), high, is_lower_better=True) == 120 / 100 - 1
    assert behind_by(low, high, is_lower_better=True) is None
    assert behind_by(Spread.of([99.99]), high) is None


def test_every_policy_by_predicted_length_is_compared_with_both_baselines():
    """In one case s3's range overlaps, and auto is ahead of one baseline and behind the other."""
    found = _spreads(
        orca=[1.0, 1.0],
        vllm_like=[98.0, 102.0],
        s3=[60.0, 99.0],
        s3_oracle=[120.0, 130.0],
        auto=[110.0, 112.0],
    )
    assert losses("tokens/s", {"": found}) == (
        "Lost in tokens/s: s3 is 20% behind vllm like (their ranges overlap) and 36% behind "
        "s3 oracle, auto is 11% behind s3 oracle."
    )


def test_places_are_named():
    """Only places with a loss are named; single runs have no ranges that could overlap."""
    sets = {
        "A": _spreads(vllm_like=[1.0], s3_oracle=[1.0], auto=[2.0]),
        "B": _spreads(vllm_like=[1.0], s3_oracle=[1.0], auto=[0.5]),
        "C": _spreads(vllm_like=[1.0], s3_oracle=[0.1], auto=[0.995]),
    }
    assert losses("s", sets) == (
        "Lost in s, B: auto is 50% behind vllm like and 50% behind s3 oracle; "
        "C: auto is 0.5% behind vllm like."
    )
    assert losses("s", {"A": sets["A"]}) == (
        "Nothing lost in s: auto is not behind vllm like and s3 oracle."
    )


def test_missing_baselines_are_said_and_other_tables_are_left_alone():
    """Tables without s3 and auto get no sentence."""
    found = _spreads(orca=[1.0], s3=[2.0])
    assert losses("s", {"": found}) == "vllm like and s3 oracle were not measured here."
    assert losses("s", {"": _spreads(orca=[1.0], vllm_like=[2.0])}) == ""
