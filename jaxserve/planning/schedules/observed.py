"""Observed lengths of answers, and their classes of latency bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import final

from jaxserve.core.request import Completion, Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.planning.schedules.schedule import LatencyBounds
from jaxserve.scheduling.lengths import LengthEstimate
from jaxserve.scheduling.scheduler import Scheduler

# Most classes; beyond these, classes of similar tightness are merged.
_MOST_CLASSES = 4
# Standard deviations by which the sequences of a class may exceed their expected number without
# causing preemptions.
_SPREAD = 2.0
# Bound in `SamplingParams` -> field of `LatencyBounds`.
_FIELDS = {
    "latency_bound": "latency_s",
    "first_token_bound": "first_token_s",
    "token_bound": "token_s",
}


@final
@dataclass(frozen=True, kw_only=True)
class OwnSpan:
    """A bound of a class, as a number of output tokens to generate within some seconds.

    Attributes:
      name: the bound's name in `SamplingParams`.
      is_whole: whether the span starts at submission, which includes the steps in flight and those
        of the prompt; otherwise it starts at the first token.
      bound_s: seconds allowed.
      per: tokens by which seconds are divided in reports, to match the bound's unit.
    """

    name: str
    num_tokens: int
    is_whole: bool
    bound_s: float
    per: int = 1


@final
@dataclass(frozen=True, kw_only=True)
class RequestClass:
    """Observed requests with the same latency bounds of their own.

    Attributes:
      bounds: from the submission to the end and to the first token, and per token after it.
      max_answer_tokens: the output tokens that nearly none of its answers exceeds.
      num_running: most that run at a time, by Little's law: they arrive independently, and each
        runs at most for its bound, or for the longest observed time.
      min_answer_tokens: the output tokens that nearly all of its answers reach. The mean seconds
        per token vary most over short answers.
    """

    bounds: LatencyBounds
    max_answer_tokens: int
    num_running: int
    min_answer_tokens: int = 2

    @property
    def spans(self) -> tuple[OwnSpan, ...]:
        later = max(1, self.min_answer_tokens - 1)
        wanted = {
            "latency_bound": (self.max_answer_tokens, True, 1),
            "first_token_bound": (1, True, 1),
            "token_bound": (later, False, later),
        }
        finite = self.bounds.finite()
        return tuple(
            OwnSpan(
                name=name,
                num_tokens=num_tokens,
                is_whole=is_whole,
                bound_s=per * finite[_FIELDS[name]],
                per=per,
            )
            for name, (num_tokens, is_whole, per) in wanted.items()
            if _FIELDS[name] in finite
        )


def spans_of(classes: Sequence[RequestClass]) -> list[OwnSpan]:
    return [span for each in classes for span in each.spans]


@final
@dataclass(frozen=True, kw_only=True)
class AnswerLength:
    """The lengths of an ended or running answer.

    Attributes:
      admitted_s: time of its admission on the engine's clock; minus infinity if unknown.
      num_prompt, num_output: tokens so far.
      estimate: predicted length of a running answer, if there is one.
      limit: the output tokens at which a running answer ends in any case; None if unknown.
      ran_s: seconds from its admission to its end, if both are known.
    """

    admitted_s: float
    num_prompt: int
    num_output: int
    has_ended: bool = True
    estimate: LengthEstimate | None = None
    limit: int | None = None
    bounds: LatencyBounds = LatencyBounds()
    ran_s: float | None = None


def own_bounds(params: SamplingParams) -> LatencyBounds:
    return LatencyBounds(**{_FIELDS[name]: bound_s for name, bound_s in params.bounds.items()})


def unfinished(scheduler: Scheduler) -> list[AnswerLength]:
    """Return the admitted, running answers, without scores; call it on the engine's thread."""
    return [
        AnswerLength(
            admitted_s=sequence.times.admitted_s,
            num_prompt=len(sequence.request.given_prompt),
            num_output=len(sequence.output),
            has_ended=False,
            estimate=scheduler.lengths.estimate(sequence),
            bounds=own_bounds(sequence.request.params),
            limit=sequence.max_length - len(sequence.request.prompt),
        )
        for sequence in scheduler.begun
        if sequence.times.admitted_s is not None and not sequence.request.params.only_scores
    ]


def answer_lengths(request: Request, completion: Completion) -> list[AnswerLength]:
    """Return the lengths of a completion's whole samples (no scores), ended by stop or limit."""
    admitted_s, ended_s = completion.timing.admitted_s, completion.timing.finished_s
    if admitted_s is None or request.params.only_scores:
        return []
    return [
        AnswerLength(
            admitted_s=admitted_s,
            num_prompt=len(completion.prompt_token_ids),
            num_output=len(sample.token_ids),
            bounds=own_bounds(request.params),
            ran_s=None if ended_s is None else ended_s - admitted_s,
        )
        for sample in completion.samples
        if sample.finish_reason in ("stop", "length") and sample.token_ids
    ]


def classes_of(answers: Sequence[AnswerLength], num_slots: int) -> tuple[RequestClass, ...]:
    """Return the classes of ended answers, the tightest first; they reserve half of the slots at
    most.
    """
    by_bounds: dict[LatencyBounds, list[AnswerLength]] = {}
    for answer in answers:
        if answer.has_ended and answer.bounds != LatencyBounds():
            by_bounds.setdefault(answer.bounds, []).append(answer)
    kinds = sorted(map(_BoundsGroup.of, by_bounds.values()), key=lambda each: each.tightness)
    num_classes = min(len(kinds), _MOST_CLASSES)
    most = max(1, num_slots // (2 * max(1, num_classes)))
    classes = []
    for index in range(num_classes):
        begin, end = (len(kinds) * i // num_classes for i in (index, index + 1))
        classes.append(_merged(kinds[begin:end], most))
    return tuple(sorted(classes, key=lambda each: astuple(each.bounds)))


@final
@dataclass(frozen=True)
class _BoundsGroup:
    answers: list[AnswerLength]
    max_tokens: int
    min_tokens: int

    @classmethod
    def of(cls, answers: list[AnswerLength]) -> _BoundsGroup:
        lengths = sorted(answer.num_output for answer in answers)
        level = 0.99 + math.sqrt(0.99 * 0.01 / len(lengths))
        last = min(len(lengths) - 1, math.ceil(level * len(lengths)) - 1)
        return cls(answers, lengths[last], lengths[len(lengths) - 1 - last])

    @property
    def bounds(self) -> LatencyBounds:
        return self.answers[0].bounds

    @property
    def tightness(self) -> tuple[float, ...]:
        """The sort key, tightest first: a bound on a whole answer counts per token."""
        return self.bounds.latency_s / self.max_tokens, *astuple(self.bounds)


def _merged(kinds: Sequence[_BoundsGroup], most: int) -> RequestClass:
    """Return the class of bounds groups, the tightest first, with at most `most` running sequences.

    Its whole-answer bound and length are the tightest group's, because the tightest bound with the
    longest answer might be a combination that no request has.
    """
    answers = [answer for kind in kinds for answer in kind.answers]
    first, bounds = kinds[0], tightest(kind.bounds for kind in kinds)
    return RequestClass(
        bounds=replace(bounds, latency_s=first.bounds.latency_s),
        max_answer_tokens=first.max_tokens,
        min_answer_tokens=min(kind.min_tokens for kind in kinds),
        num_running=_num_running(answers, max(kind.bounds.latency_s for kind in kinds), most),
    )


def tightest(bounds: Iterable[LatencyBounds]) -> LatencyBounds:
    by_kind = zip(*(astuple(each) for each in bounds), strict=True)
    return LatencyBounds(**dict(zip(_FIELDS.values(), map(min, by_kind), strict=True)))


def _num_running(answers: Sequence[AnswerLength], longest_s: float, most: int) -> int:
    """Return the sequences of a class that run at a time, at most `most`.

    If times are unknown, all observed answers count, plus a margin for chance.
    """
    if longest_s == math.inf:
        longest_s = max((a.ran_s for a in answers if a.ran_s is not None), default=math.inf)
    most = min(most, math.ceil(len(answers) + _SPREAD * math.sqrt(len(answers))))
    times = [answer.admitted_s for answer in answers if math.isfinite(answer.admitted_s)]
    span_s = max(times) - min(times) if len(times) > 1 else 0.0
    if not span_s or longest_s == math.inf:
        return most
    mean = (len(times) - 1) / span_s * longest_s
    return min(most, math.ceil(mean + _SPREAD * math.sqrt(mean)))
