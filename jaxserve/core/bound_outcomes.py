"""Whether a request kept the latency bounds of its own."""

from __future__ import annotations

from typing import Literal, TypeAlias

from jaxserve.core.errors import BoundNotMetError
from jaxserve.core.request import Completion, Timing
from jaxserve.core.sampling_params import BOUND_NAMES, SamplingParams

Outcome: TypeAlias = Literal["kept", "missed", "refused"]
OUTCOMES: tuple[Outcome, ...] = ("kept", "missed", "refused")


def bound_outcomes(params: SamplingParams, completion: Completion) -> dict[str, Outcome]:
    """Return what became of each bound of a request that has ended, by name.

    A request that was refused has one bound that it was refused for. One that was cancelled, or
    that failed in another way, has none. The seconds per token are those of its longest sample.
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
