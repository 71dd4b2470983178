"""Statistics of completions: throughput, latencies, and whether latency bounds were kept."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal, TypeAlias

from jaxserve.core.errors import BoundNotMetError
from jaxserve.core.request import Completion, Timing
from jaxserve.core.sampling_params import BOUND_NAMES, SamplingParams

BoundOutcome: TypeAlias = Literal["kept", "missed", "refused"]
PERCENTILES = (50.0, 90.0, 99.0)
OUTCOMES: tuple[BoundOutcome, ...] = ("kept", "missed", "refused")


def summarise(completions: Sequence[Completion], wall_s: float) -> dict[str, object]:
    """Return throughput and latency figures of completions that took `wall_s` seconds in all.

    Rates count the output tokens of all samples. `time_per_output_token_s` is the time from the
    first to the last token divided by the number of tokens after the first, for requests with at
    least two. `normalised_latency_s` is the latency divided by the number of output tokens.
    """
    done = [item for item in completions if item.error is None]
    num_output = sum(len(sample.token_ids) for item in done for sample in item.samples)
    return {
        "num_requests": len(completions),
        "num_failed": len(completions) - len(done),
        "prompt_tokens": sum(len(item.prompt_token_ids) for item in done),
        "output_tokens": num_output,
        "wall_s": wall_s,
        "output_tokens_per_s": num_output / wall_s,
        "requests_per_s": len(done) / wall_s,
        "time_to_first_token_s": spread(
            [
                item.timing.time_to_first_token_s
                for item in done
                if item.timing.time_to_first_token_s is not None
            ]
        ),
        "time_per_output_token_s": spread(
            [rate for item in done if (rate := _time_per_output_token_s(item)) is not None]
        ),
        "latency_s": spread(
            [item.timing.latency_s for item in done if item.timing.latency_s is not None]
        ),
        "normalised_latency_s": spread(
            [rate for item in done if (rate := _normalised_latency_s(item)) is not None]
        ),
        "num_preemptions": sum(item.timing.num_preemptions for item in done),
    }


def goodput(
    completions: Sequence[Completion],
    wall_s: float,
    *,
    max_first_token_s: float = float("inf"),
    max_time_per_output_token_s: float = float("inf"),
) -> dict[str, float]:
    """Return the share of requests within both bounds, and their number per second.

    A failed request is not within the bounds. An answer of one token has no time per output token
    and is within that bound.
    """
    num_within = sum(
        item.error is None
        and item.timing.time_to_first_token_s is not None
        and item.timing.time_to_first_token_s <= max_first_token_s
        and (_time_per_output_token_s(item) or 0.0) <= max_time_per_output_token_s
        for item in completions
    )
    share = num_within / len(completions) if completions else 0.0
    return {"share": share, "requests_per_s": num_within / wall_s}


def fairness(values: Sequence[float]) -> float:
    """Return Jain's index: 1 if all values are equal, 1 / n if one of n has everything."""
    squares = len(values) * sum(value * value for value in values)
    return sum(values) ** 2 / squares if squares else 1.0


def spread(
    values: Sequence[float], percentiles: Sequence[float] = PERCENTILES
) -> dict[str, float] | None:
    """Return mean and percentiles, such as "p50"; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    found = {f"p{each:g}": _percentile(ordered, each / 100) for each in percentiles}
    return {"mean": statistics.fmean(ordered), **found}


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile by linear interpolation between the two nearest ranks."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _normalised_latency_s(item: Completion) -> float | None:
    """Return seconds from arrival to end per output token, as ORCA and vLLM report it."""
    num_output = sum(len(sample.token_ids) for sample in item.samples)
    latency_s = item.timing.latency_s
    return latency_s / num_output if latency_s is not None and num_output else None


def _time_per_output_token_s(item: Completion) -> float | None:
    longest = max((len(sample.token_ids) for sample in item.samples), default=0)
    first, last = item.timing.first_token_s, item.timing.finished_s
    if longest < 2 or first is None or last is None:
        return None
    return (last - first) / (longest - 1)


def bound_outcomes(params: SamplingParams, completion: Completion) -> dict[str, BoundOutcome]:
    """Return the outcome of each bound of a request that has ended, by name.

    A request refused for a bound has only that bound. A request that was cancelled, or failed in
    another way, has none. The seconds per token are those of its longest sample.
    """
    error, bounds = completion.error, params.bounds
    if isinstance(error, BoundNotMetError):
        return {error.name: "refused"}
    if not bounds or error is not None or completion.finish_reason not in ("stop", "length"):
        return {}
    num_tokens = max(len(sample.token_ids) for sample in completion.samples)
    taken_s = dict(zip(BOUND_NAMES, _taken_s(completion.timing, num_tokens), strict=True))
    return {
        name: "kept" if seconds <= bounds[name] else "missed"
        for name, seconds in taken_s.items()
        if name in bounds and seconds is not None
    }


def _taken_s(timing: Timing, num_tokens: int) -> tuple[float | None, float | None, float | None]:
    """Return the seconds to the end, to the first token, and per token after it."""
    latency_s, first_s = timing.latency_s, timing.time_to_first_token_s
    if latency_s is None or first_s is None:
        return latency_s, first_s, None
    return latency_s, first_s, (latency_s - first_s) / max(1, num_tokens - 1)
