"""When a rate sweep continues and when it stops, with a fake engine."""

from __future__ import annotations

import pytest

from benchmarks.common import sweep
from benchmarks.common.harness import numbers
from jaxserve.core.errors import InvalidConfigError

pytestmark = pytest.mark.fast

TOKENS = 100


def _engine(capacity: float, calls: list, knee: float = 1e9):
    """Return an engine that serves up to `capacity` requests a second and queues above `knee`."""

    def play(name: str, rate: float) -> sweep.Figures:
        calls.append((name, rate))
        served = min(rate, capacity)
        p90 = 0.1 if rate < knee else 0.6
        return {"output_tokens_per_s": served * TOKENS, "normalised_latency_s": {"p90": p90}}

    return play


def test_climb_stops_where_throughput_no_longer_rises():
    """The last rate is the first whose throughput rises by less than a tenth of the rate's rise."""
    calls = []
    curve = sweep.climb(_engine(3.0, calls), ["a"], start=0.5, repeats=1)["a"]
    assert [rate for _, rate in calls] == [0.5, 1, 2, 4, 8]
    assert curve.stopped_by == "throughput"
    assert [point["rate"] for point in curve.points] == [0.5, 1, 2, 4, 8]


def test_climb_stops_where_latency_leaves_its_flat_part():
    """Five times the latency at the lowest rate ends the climb, however much throughput rises."""
    curve = sweep.climb(_engine(1e9, [], knee=2), ["a"], start=0.5, repeats=1)["a"]
    assert curve.stopped_by == "latency"
    assert curve.points[-1]["rate"] == 2


def test_policies_take_turns_and_stop_each_by_itself():
    """A policy that has a reason to stop skips later rates; the other continues up to the limit."""
    calls = []
    slow, fast = _engine(1.0, calls), _engine(1e9, calls)

    def play(name: str, rate: float) -> sweep.Figures:
        return (slow if name == "slow" else fast)(name, rate)

    curves = sweep.climb(play, ["slow", "fast"], start=0.5, max_rates=4, repeats=1)
    assert calls[:4] == [("slow", 0.5), ("fast", 0.5), ("slow", 1.0), ("fast", 1.0)]
    assert calls[4:] == [("slow", 2.0), ("fast", 2.0), ("fast", 4.0)]
    assert curves["slow"].stopped_by == "throughput"
    assert curves["fast"].stopped_by == "number of rates"


def test_runs_at_a_rate_alternate_and_their_median_counts():
    """The order is a, b, a, b, a, b at each rate; the median decides whether to stop."""
    calls = []
    p90_s = iter([0.1, 0.1, 0.1, 9.0, 0.2, 0.3, 0.1, 0.1, 9.0, 9.0, 9.0, 9.0])

    def play(name: str, rate: float) -> sweep.Figures:
        calls.append((name, rate))
        return {"output_tokens_per_s": rate, "normalised_latency_s": {"p90": next(p90_s)}}

    curves = sweep.climb(play, ["a", "b"], start=1, max_rates=2, repeats=3)
    assert calls == [("a", 1), ("b", 1)] * 3 + [("a", 2), ("b", 2)] * 3
    first, second = curves["a"].points
    assert [run["normalised_latency_s"]["p90"] for run in first["runs"]] == [0.1, 0.1, 0.2]
    assert first["normalised_latency_s"]["p90"] == 0.1
    assert first["range"]["normalised_latency_s"]["p90"] == [0.1, 0.2]
    assert (first["rate"], second["rate"]) == (1, 2)
    assert sweep.p90(second) == 9.0 and curves["a"].stopped_by == "latency"
    assert sweep.p90(curves["b"].points[0]) == 0.3


def test_given_rates_are_all_played():
    """Requested rates are all run, even if latency explodes."""
    calls = []
    curves = sweep.play_every(
        _engine(1.0, calls, knee=0), ["a", "b"], numbers("4,1", "--rates"), repeats=1
    )
    assert calls == [("a", 4.0), ("b", 4.0), ("a", 1.0), ("b", 1.0)]
    assert [point["rate"] for point in curves["b"].points] == [4.0, 1.0]


@pytest.mark.parametrize("text", ["", "1,", "fast", "0", "1,-2", "nan", "inf"])
def test_other_rates_are_refused(text):
    """The error shows what is allowed."""
    with pytest.raises(InvalidConfigError, match="0.5,1,2"):
        numbers(text, "--rates")
