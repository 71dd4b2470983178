"""One sample of a request between its submission and its end."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import final

import numpy as np

from jaxserve.core.errors import JaxserveError
from jaxserve.core.request import FinishReason, Request, TokenLogprob
from jaxserve.scheduling.kv.sequence_kv import SequenceKV


class Phase(enum.Enum):
    WAITING = "waiting"  # in the pool, holds neither slot nor pages
    RUNNING = "running"  # holds a slot and pages
    CLOSING = "closing"  # as many tokens are planned as it may have; slot and pages are freed
    FINISHED = "finished"


@final
@dataclass(eq=False)
class SequenceTimes:
    """When things happened to a sequence, in seconds on the engine's clock; None for never."""

    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    def end(self, now_s: float, *, has_output: bool) -> None:
        """Set the time of the end, and of the first token if all tokens were forced."""
        self.finished_s = now_s
        if has_output and self.first_token_s is None:
            self.first_token_s = now_s


@final
@dataclass(eq=False)
class SequenceScores:
    """Log-probabilities of output tokens and, by position, of prompt tokens, if requested."""

    output: list[TokenLogprob] = field(default_factory=list)
    prompt: dict[int, TokenLogprob] = field(default_factory=dict)


@final
@dataclass(eq=False)
class Sequence:
    """Identity, tokens and phase of a sequence. Only the scheduler writes them.

    The device is ahead of what the host has read, so there are two counts of output tokens: those
    known (`output`) and those planned (`num_planned_outputs`, known plus in flight). What is
    planned is a bound: if a step delivers fewer tokens, the difference is taken back.

    Attributes:
      key: unique within a scheduler; names the sequence in plans.
      max_length: the most prompt and output tokens together.
      primary: the request's first sample, whose prompt pages this one shares; None for itself.
      slot: row of the device batch while it runs.
      falls_short: whether a step has delivered fewer tokens than planned before the answer's end.
        Such a sequence keeps its slot and pages until its last token has been read.
      num_in_flight: rows of submitted steps that have not been read.
      num_lost: handovers in a row whose pages did not arrive.
    """

    key: int
    request: Request
    sample_index: int
    max_length: int
    kv: SequenceKV
    primary: Sequence | None = None
    phase: Phase = Phase.WAITING
    slot: int | None = None
    output: list[int] = field(default_factory=list)
    num_planned_outputs: int = 0
    num_in_flight: int = 0
    falls_short: bool = False
    num_preemptions: int = 0
    num_lost: int = 0
    scores: SequenceScores = field(default_factory=SequenceScores)
    times: SequenceTimes = field(default_factory=SequenceTimes)
    finish_reason: FinishReason | None = None
    error: JaxserveError | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def planned_length(self) -> int:
        return len(self.request.prompt) + self.num_planned_outputs

    @property
    def num_uncomputed(self) -> int:
        """Tokens without KV: 1 for a decoding sequence, more while its prefill lasts."""
        kv = self.kv
        num_behind = len(self.request.prompt) + self.num_planned_outputs - kv.num_computed
        if not kv.ahead:
            return num_behind
        return num_behind - sum(end - start for start, end in kv.ahead)

    @property
    def num_outputs_left(self) -> int:
        return self.max_length - len(self.request.prompt) - self.num_planned_outputs

    @property
    def is_decoding(self) -> bool:
        """Whether only output is left to compute: the newest token, and forced ones before it.

        Tokens that a preempted sequence has to recompute count as its prompt does.
        """
        if self.num_uncomputed == 1:
            return True
        return self.request.awaits_tokens and self.kv.num_computed >= self.prompt_length

    @property
    def awaits_token(self) -> bool:
        """Whether a token in flight must be read before its next step can be planned."""
        return self.request.awaits_tokens and self.num_planned_outputs > len(self.output)

    @property
    def may_grow(self) -> bool:
        """Whether a token may be planned: its pages are resident, and it is below its limit."""
        if self.kv.awaits is not None or (self.request.awaits_tokens and self.awaits_token):
            return False
        return not self.falls_short or self.planned_length < self.max_length

    @property
    def is_steady(self) -> bool:
        """Whether every step has given a running answer its planned tokens: it keeps decoding."""
        is_answer = self.slot is not None and self.num_planned_outputs > 0
        return is_answer and not (self.falls_short or self.request.awaits_tokens)

    @property
    def num_known(self) -> int:
        return len(self.request.prompt) + len(self.output)

    @property
    def known_tokens(self) -> tuple[int, ...]:
        return (*self.request.prompt, *self.output) if self.output else self.request.prompt

    def known_from(self, start: int) -> tuple[int, ...]:
        """Return `known_tokens[start:]`, all of the answer, without copying the prompt."""
        return tuple(self.output[start - len(self.request.prompt) :])

    @property
    def known_array(self) -> np.ndarray:
        prompt = self.request.prompt_array
        return np.append(prompt, np.asarray(self.output, np.int32)) if self.output else prompt

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.params.prompt_logprobs is not None and self.sample_index == 0

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts of tokens agree, before its end."""
        if self.phase is not Phase.FINISHED:
            num_unread = self.num_planned_outputs - len(self.output)
            assert num_unread >= 0, "more tokens came than were planned"
            assert self.num_in_flight or not num_unread, "tokens are planned for ever"
            assert self.num_outputs_left >= 0, "more tokens are planned than it may have"
            is_one_step = num_unread <= 1 or self.num_in_flight <= 1
            assert is_one_step or not self.request.awaits_tokens, (
                "it runs ahead of tokens that it awaits"
            )

    def drop_output(self) -> None:
        self.num_planned_outputs = 0
        self.output.clear()
        self.scores = SequenceScores()
        self.times.first_token_s = None


def split(sequences: Iterable[Sequence], group: int) -> tuple[list[Sequence], list[Sequence]]:
    """Return which of a device group's running sequences decode, and which have a prompt left.

    One whose newest token has to be read first, or whose pages have to come, is in neither.
    """
    decoding: list[Sequence] = []
    prefilling: list[Sequence] = []
    for sequence in sequences:
        if sequence.kv.group != group or sequence.kv.awaits is not None:
            continue
        if not sequence.is_decoding:
            prefilling.append(sequence)
        elif sequence.may_grow:
            decoding.append(sequence)
    return decoding, prefilling
