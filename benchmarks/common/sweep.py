"""Which rates are worth a run, and when a policy has had enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any, final

from jaxserve.core.errors import InvalidConfigError

# Times its value at the lowest rate; beyond, latency has left its flat part.
FLAT = 5.0
# Throughput that rises by less than this share of the rate's own rise is saturated.
RISING = 0.1

Figures = dict[str, Any]


@final
@dataclass
class Curve:
    """One policy's figures by rate, and why it saw no higher one."""

    points: list[Figures] = field(default_factory=list)
    stopped_by: str | None = None


def rates_from(text: str) -> list[float]:
    """Requests a second, separated by commas.

    Raises:
      InvalidConfigError: something else, or a rate that is not above 0.
    """
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise InvalidConfigError(
            f"rates {text!r} are not understood; give requests a second above 0, such as 0.5,1,2"
        )
    return rates


def geometric(start: float, factor: float) -> Iterator[float]:
    """start, start x factor, start x factor², ... without end.

    Raises:
      InvalidConfigError: a factor that is not above 1, or a start that is not above 0.
    """
    if not factor > 1 or not start > 0:
        raise InvalidConfigError(
            f"a sweep from rate {start} by factor {factor} goes nowhere; "
            "give a rate above 0 and a factor above 1"
        )
    return (start * factor**power for power in count())


def play_every(
    play: Callable[[str, float], Figures], names: Sequence[str], rates: Sequence[float]
) -> dict[str, Curve]:
    """Every policy at every rate, policies taking turns."""
    curves = {name: Curve(stopped_by="rates given") for name in names}
    for rate in rates:
        for name, curve in curves.items():
            curve.points.append({"rate": rate, **play(name, rate)})
    return curves


def climb(
    play: Callable[[str, float], Figures],
    names: Sequence[str],
    *,
    start: float,
    factor: float,
    max_rates: int,
) -> dict[str, Curve]:
    """Raise the rate, policies taking turns, until each has seen enough.

    Args:
      play: figures of a policy at a rate: `output_tokens_per_s` and `normalised_latency_s`.
      start: requests a second that every policy serves without a queue.
      max_rates: most rates a policy.
    """
    curves = {name: Curve() for name in names}
    for index, rate in enumerate(geometric(start, factor)):
        for name, curve in curves.items():
            if curve.stopped_by is None:
                curve.points.append({"rate": rate, **play(name, rate)})
                curve.stopped_by = reason_to_stop(curve.points)
                if curve.stopped_by is None and index + 1 >= max_rates:
                    curve.stopped_by = "number of rates"
        if all(curve.stopped_by for curve in curves.values()):
            return curves
    raise AssertionError("rates do not end")


def reason_to_stop(points: Sequence[Figures]) -> str | None:
    """Why no higher rate would tell more; None to go on."""
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
    """Requests served a second where the 90th percentile of normalised latency is `bound_s`.

    On a straight line between the points around it; None where there are none around it.
    """
    for below, above in pairwise(points):
        low, high = p90(below), p90(above)
        if low <= bound_s < high:
            share = (bound_s - low) / (high - low)
            rise = above["requests_per_s"] - below["requests_per_s"]
            return below["requests_per_s"] + share * rise
    return None


def p90(point: Figures) -> float:
    """Of normalised latency; infinity where nothing was answered."""
    spread = point["normalised_latency_s"]
    return math.inf if spread is None else spread["p90"]
