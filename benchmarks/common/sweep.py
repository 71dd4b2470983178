"""Sweeps over arrival rates: which rates are played, and when a policy stops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import final

from benchmarks.common.repeats import Figures, summary, take_turns

# Latency over its value at the lowest rate, beyond which it is no longer flat.
FLAT = 5.0
# Throughput is saturated if it rises by less than this share of the rise of the rate.
RISING = 0.1
# The policy that serves conversations without their pages.
STATELESS = "vllm_like"
# Most rates of a policy.
MAX_RATES = 8

# (policy, rate) -> figures of one run
Play = Callable[[str, float], Figures]


@final
@dataclass
class Curve:
    """One policy's figures by rate (`points`, see `summary`), and why no higher rate was played."""

    points: list[Figures] = field(default_factory=list)
    stopped_by: str | None = None


def play_every(
    play: Play, names: Sequence[str], rates: Sequence[float], *, repeats: int
) -> dict[str, Curve]:
    """Play every policy `repeats` times at every rate, policies in turns."""
    curves = {name: Curve(stopped_by="rates given") for name in names}
    for rate in rates:
        for name, point in _points(play, names, rate, repeats).items():
            curves[name].points.append(point)
    return curves


def climb(
    play: Play, names: Sequence[str], *, start: float, repeats: int, max_rates: int = MAX_RATES
) -> dict[str, Curve]:
    """Double the rate, policies in turns, until each has a reason to stop.

    Args:
      play: returns `output_tokens_per_s` and `normalised_latency_s` among other figures.
      start: requests a second that every policy serves without a queue.
      max_rates: most rates for each policy.
      repeats: runs of a policy at a rate.
    """
    curves = {name: Curve() for name in names}
    for rate in (start * 2**power for power in range(max_rates)):
        names = [name for name, curve in curves.items() if curve.stopped_by is None]
        for name, point in _points(play, names, rate, repeats).items():
            curves[name].points.append(point)
            curves[name].stopped_by = reason_to_stop(curves[name].points)
    for curve in curves.values():
        curve.stopped_by = curve.stopped_by or "number of rates"
    return curves


def _points(play: Play, names: Sequence[str], rate: float, repeats: int) -> dict[str, Figures]:
    at = f"{rate:.3g} a second"
    runs = take_turns(names, repeats, lambda name: play(name, rate), at=at)
    return {name: {"rate": rate, **summary(own)} for name, own in runs.items()}


def reason_to_stop(points: Sequence[Figures]) -> str | None:
    """Return why a higher rate adds no information; None to continue."""
    first, last = points[0], points[-1]
    if last["normalised_latency_s"]["p90"] > FLAT * first["normalised_latency_s"]["p90"]:
        return "latency"
    if len(points) > 1:
        before = points[-2]
        rise = last["output_tokens_per_s"] / before["output_tokens_per_s"] - 1
        if rise < RISING * (last["rate"] / before["rate"] - 1):
            return "throughput"
    return None


def served_at(points: Sequence[Figures], bound_s: float) -> float | None:
    """Return the requests served a second where p90 of normalised latency is `bound_s` seconds.

    It interpolates linearly between the two points around the bound; None if there are none.
    """
    for below, above in pairwise(points):
        low, high = p90(below), p90(above)
        if low <= bound_s < high:
            share = (bound_s - low) / (high - low)
            rise = above["requests_per_s"] - below["requests_per_s"]
            return below["requests_per_s"] + share * rise
    return None


def at_bound(curves: Mapping[str, Curve], bound_s: float) -> dict[str, Figures]:
    """Return the curves with what each serves at a bound, alone and over stateless serving.

    Returns:
      Each curve, `requests_per_s_at_bound` (see `served_at`), and `of_stateless`, its ratio to that
        of `STATELESS`; None where either does not reach the bound.
    """
    served = {name: served_at(curve.points, bound_s) for name, curve in curves.items()}
    other = served.get(STATELESS)
    return {
        name: {
            **asdict(curve),
            "requests_per_s_at_bound": served[name],
            "of_stateless": own / other if (own := served[name]) and other else None,
        }
        for name, curve in curves.items()
    }


def p90(point: Figures) -> float:
    """Return the 90th percentile of normalised latency; infinity without an answer."""
    spread = point["normalised_latency_s"]
    return math.inf if spread is None else spread["p90"]
