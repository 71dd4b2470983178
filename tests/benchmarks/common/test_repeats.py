"""Order, medians, ranges and ratios of whole runs, against runs computed by hand."""

from __future__ import annotations

import pytest

from benchmarks.common.harness import Benchmark
from benchmarks.common.repeats import Spread, in_turns, ratios, repeats, summary

pytestmark = pytest.mark.fast


def _run(wall_s: float, first_s: float, hit: int | None = None) -> dict:
    return {
        "policy": "a",
        "wall_s": wall_s,
        "output_tokens_per_s": 600 / wall_s,
        "latency_s": {"p50": wall_s / 2, "p99": first_s},
        "num_hit": hit,
        "steps": [wall_s],
        "is_warm": True,
    }


def test_runs_take_turns():
    """Each name runs once before a name runs again."""
    assert list(in_turns(["a", "b", "c"], 2)) == [
        *((0, name) for name in "abc"),
        *((1, name) for name in "abc"),
    ]


@pytest.mark.parametrize("number", [0, -1])
def test_no_runs_are_refused(number: int, capsys):
    """The number is refused before anything is measured."""
    runs = []
    main = Benchmark("About: `python -m about`.", runs.append, (repeats("way"),), "about")
    assert main(["--repeats", f"{number}"]) == 2 and runs == []
    assert f"--repeats is {number}; it must be at least 1" in capsys.readouterr().err


def test_three_runs_worked_out_by_hand():
    """600 tokens in 10, 30 and 20 s: each figure has its own median, taken from a whole run."""
    runs = [_run(10.0, 7.0, 3), _run(30.0, 1.0, 5), _run(20.0, 9.0, 4)]
    found = summary(runs)
    assert found.pop("runs") == runs
    assert found.pop("range") == {
        "wall_s": [10.0, 30.0],
        "output_tokens_per_s": [20.0, 60.0],
        "latency_s": {"p50": [5.0, 15.0], "p99": [1.0, 9.0]},
        "num_hit": [3, 5],
    }
    assert found == {
        "policy": "a",
        "wall_s": 20.0,
        "output_tokens_per_s": 30.0,
        "latency_s": {"p50": 10.0, "p99": 7.0},
        "num_hit": 4,
        "is_warm": True,
    }


def test_two_runs_have_the_mean_of_both_and_one_run_is_itself():
    """The range still has both runs; a single run has a range of one value."""
    two = summary([_run(10.0, 1.0), _run(30.0, 2.0)])
    assert two["wall_s"] == 20.0 and two["range"]["wall_s"] == [10.0, 30.0]
    one = summary([_run(10.0, 1.0)])
    assert one["wall_s"] == 10.0 and one["range"]["wall_s"] == [10.0, 10.0]
    assert one["steps"] == [10.0]


def test_a_figure_that_one_run_lacks_has_no_median():
    """The figure is None: it is neither the median of the other runs nor a range."""
    found = summary([_run(10.0, 1.0, 3), _run(20.0, 1.0, None), _run(30.0, 1.0, 5)])
    assert found["num_hit"] is None
    assert "num_hit" not in found["range"]


def test_ratios_are_of_runs_of_one_round():
    """30/60, 40/50 and 50/100; not the ratio of the medians, 40/60."""
    found = ratios([30.0, 40.0, 50.0], [60.0, 50.0, 100.0])
    assert found == [0.5, 0.8, 0.5]
    assert Spread.of(found) == Spread(0.5, 0.5, 0.8, 3)
    assert ratios([30.0, 40.0], [60.0]) == [0.5]


def test_ranges_that_touch_overlap():
    """The order of the arguments does not matter; ranges without a common value do not overlap."""
    low, high = Spread.of([1.0, 2.0, 3.0]), Spread.of([3.0, 4.0])
    assert low.overlaps(high) and high.overlaps(low)
    assert not low.overlaps(Spread.of([3.1, 9.0]))
    assert high.median == 3.5
