"""Records in Chrome's trace event format, which Perfetto reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve.engine.recorder import RequestRecord, StepRecord

_DEVICE, _REQUESTS = 1, 2


def trace_events(
    steps: Sequence[StepRecord], requests: Sequence[RequestRecord]
) -> list[dict[str, Any]]:
    """Return tracks of steps and counters per replica, and a track per request.

    A replica has a track of steps for each device group, and one for the link between them. Times
    are relative to the earliest event.
    """
    starts = [step.submitted_s for step in steps] + [r.timing.arrival_s for r in requests]
    origin_s = min(starts, default=0.0)
    events = [_name(_DEVICE, "device"), _name(_REQUESTS, "requests")]
    busy_until_s: dict[int, float] = {}
    tracks = _tracks(steps)
    for step in steps:
        if step.collected_s is None:
            continue
        track = tracks[step.replica, step.group]
        # A group runs its steps in order, so a step begins when the previous one ends.
        begin_s = max(step.submitted_s, busy_until_s.get(track, origin_s))
        end_s = busy_until_s[track] = max(begin_s, step.collected_s)
        events.append(_span(_DEVICE, track, step.kind, begin_s, end_s, origin_s, _about(step)))
        events += _counters(step, begin_s - origin_s)
    for track, request in enumerate(requests):
        events += _phases(track, request, origin_s)
    return events


def _tracks(steps: Sequence[StepRecord]) -> dict[tuple[int, int], int]:
    """Return the track of each replica and device group: the replica's number for group 0."""
    pairs = sorted({(step.replica, step.group) for step in steps})
    tracks = {pair: pair[0] for pair in pairs if pair[1] == 0}
    first = 1 + max((replica for replica, _ in pairs), default=0)
    others = [pair for pair in pairs if pair[1] != 0]
    return tracks | {pair: first + index for index, pair in enumerate(others)}


def _about(step: StepRecord) -> dict[str, Any]:
    return {
        "rows": step.num_rows,
        "tokens": step.num_tokens,
        "iterations": step.num_iterations,
        "padding": step.num_padding_tokens,
    }


def _counters(step: StepRecord, at_s: float) -> Iterator[dict[str, Any]]:
    for name, values in (
        ("sequences", {"running": step.num_running, "waiting": step.num_waiting}),
        (
            "pages",
            {
                "owned": step.pages_owned,
                "reserved": step.pages_reserved,
                "cached": step.pages_cached,
            },
        ),
    ):
        yield {
            "ph": "C",
            "pid": _DEVICE,
            "name": name if step.replica == 0 else f"{name} of replica {step.replica}",
            "ts": at_s * 1e6,
            "args": values,
        }


def _phases(track: int, request: RequestRecord, origin_s: float) -> Iterator[dict[str, Any]]:
    times = request.timing
    about = {
        "id": request.request_id,
        "prompt tokens": request.num_prompt_tokens,
        "output tokens": request.num_output_tokens,
        "ended by": request.finish_reason,
    }
    marks = (times.arrival_s, times.admitted_s, times.first_token_s, times.finished_s)
    phases = ("waiting", "prompt", "answer")
    for phase, begin_s, end_s in zip(phases, marks[:-1], marks[1:], strict=True):
        if begin_s is not None and end_s is not None:
            yield _span(_REQUESTS, track, phase, begin_s, end_s, origin_s, about)


def _span(
    process: int,
    track: int,
    name: str,
    begin_s: float,
    end_s: float,
    origin_s: float,
    about: dict[str, Any],
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": track,
        "name": name,
        "ts": (begin_s - origin_s) * 1e6,
        "dur": (end_s - begin_s) * 1e6,
        "args": about,
    }


def _name(process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
