"""Answers whose lengths were observed, and their classes of latency bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from jaxserve.core.request import Completion, Request
from jaxserve.scheduling.lengths.estimate import LengthEstimate
from jaxserve.scheduling.scheduler import Scheduler

# More classes are merged, with the tightest bound of each group.
_MOST_CLASSES = 4
# Standard deviations by which the sequences of a class may exceed their expected number, before
# they preempt others.
_SPREAD = 2.0


@final
@dataclass(frozen=True, kw_only=True)
class RequestClass:
    """Requests with one `SamplingParams.latency_bound`, as they were observed.

    Attributes:
      latency_bound_s: seconds from the submission to the end.
      max_answer_tokens: the length, in output tokens, that nearly all of its answers keep to.
      num_running: how many run at a time at most, by Little's law: each runs for the bound at
        longest, and they arrive independently.
    """

    latency_bound_s: float
    max_answer_tokens: int
    num_running: int


@final
@dataclass(frozen=True, kw_only=True)
class AnswerLength:
    """The lengths of an answer that has ended, or that goes on.

    Attributes:
      admitted_s: when it was admitted, on the engine's clock; minus infinity where that is not
        known.
      num_prompt, num_output: tokens; of an answer that goes on, those so far.
      estimate: what is predicted of one that goes on, if anything is.
      latency_bound_s: its own bound (`SamplingParams.latency_bound`), if it has one.
    """

    admitted_s: float
    num_prompt: int
    num_output: int
    has_ended: bool = True
    estimate: LengthEstimate | None = None
    latency_bound_s: float | None = None


def unfinished(scheduler: Scheduler) -> list[AnswerLength]:
    """Return the answers that were admitted and go on; call it on the engine's thread."""
    return [
        AnswerLength(
            admitted_s=sequence.times.admitted_s,
            num_prompt=len(sequence.request.given_prompt),
            num_output=len(sequence.output),
            has_ended=False,
            estimate=scheduler.lengths.estimate(sequence),
            latency_bound_s=sequence.request.params.latency_bound,
        )
        for sequence in (*scheduler.running, *scheduler.waiting)
        if sequence.times.admitted_s is not None
    ]


def answer_lengths(request: Request, completion: Completion) -> list[AnswerLength]:
    """Return the lengths of a completion's samples that ended by themselves or at their limit."""
    admitted_s = completion.timing.admitted_s
    if admitted_s is None:
        return []
    return [
        AnswerLength(
            admitted_s=admitted_s,
            num_prompt=len(completion.prompt_token_ids),
            num_output=len(sample.token_ids),
            latency_bound_s=request.params.latency_bound,
        )
        for sample in completion.samples
        if sample.finish_reason in ("stop", "length") and sample.token_ids
    ]


def classes_of(answers: Sequence[AnswerLength], num_slots: int) -> tuple[RequestClass, ...]:
    """Return the classes of the ended answers with a bound, the tightest bound first.

    Args:
      num_slots: slots of the engine, of which classes may reserve half; each reserves at least one.
    """
    own = [
        (answer.latency_bound_s, answer)
        for answer in answers
        if answer.has_ended and answer.latency_bound_s is not None
    ]
    bounds = sorted({bound_s for bound_s, _ in own})
    groups = min(len(bounds), _MOST_CLASSES)
    classes = []
    for index in range(groups):
        begin, end = (len(bounds) * i // groups for i in (index, index + 1))
        ours = [answer for bound_s, answer in own if bounds[begin] <= bound_s <= bounds[end - 1]]
        lengths = sorted(answer.num_output for answer in ours)
        level = 0.99 + math.sqrt(0.99 * 0.01 / len(lengths))
        longest = lengths[min(len(lengths) - 1, math.ceil(level * len(lengths)) - 1)]
        classes.append(
            RequestClass(
                latency_bound_s=bounds[begin],
                max_answer_tokens=longest,
                num_running=_num_running(ours, bounds[end - 1], max(1, num_slots // (2 * groups))),
            )
        )
    return tuple(classes)


def _num_running(answers: Sequence[AnswerLength], bound_s: float, most: int) -> int:
    """Return the sequences of a class that run at a time; `most` where times are not known."""
    times = [answer.admitted_s for answer in answers if math.isfinite(answer.admitted_s)]
    span_s = max(times) - min(times) if len(times) > 1 else 0.0
    if not span_s:
        return most
    mean = (len(times) - 1) / span_s * bound_s
    return min(most, math.ceil(mean + _SPREAD * math.sqrt(mean)))
