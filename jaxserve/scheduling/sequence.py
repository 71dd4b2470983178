"""A request on the move: its tokens, its pages, its slot."""

from __future__ import annotations

import enum
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import final

from jaxserve.core.errors import JaxserveError
from jaxserve.core.request import FinishReason, Request, TokenLogprob
from jaxserve.memory.chunks import Branch, Chunk, PageKeys
from jaxserve.memory.page_table import PageTable


class Phase(enum.Enum):
    """Where a sequence stands between submission and its end."""

    WAITING = "waiting"  # in the pool, holds neither slot nor pages
    RUNNING = "running"  # holds a slot and pages
    CLOSING = "closing"  # its last token is planned; slot and pages are gone
    FINISHED = "finished"


@final
@dataclass(eq=False)
class Sequence:
    """One sample of a request.

    The device is ahead of what the host has read, so there are two counts of output tokens:
    those known (`output`) and those planned (`num_planned_outputs`, known plus in flight). A live
    sequence advances exactly as planned; one that ended early on the device advances no more.

    Attributes:
      key: unique within a scheduler; names the sequence in plans.
      sample_index: which of the request's `n` samples.
      max_length: prompt and output tokens together may not exceed this.
      table: the sequence's pages.
      leader: the sample whose prompt pages this one shares; None for the first.
      num_computed: leading tokens whose KV is written by the steps planned so far, or was found.
      ahead: [start, end) of tokens behind those whose KV was found, in order.
      last_step: index of the newest step with a row of it, or of the last one before its admission
        where it had none since.
      num_in_flight: steps submitted that may still deliver tokens of it.
      host_pages: of the host, where its KV waits while it does not run; empty if it waits nowhere.
      num_dropped: tokens whose KV it lost when it was preempted last.
      keys, branch, num_kept, unnamed: what the keeper knows of it: keys of its pages, the
        conversation it belongs to, how many of its pages the cache was told of, and those that it
        left while some of their tokens were in flight.
      prefetched: indices of pages that were brought to the device for it while it waited.
      num_outgrown: how often it used up what was reserved for it.
      num_passed: admissions that went before it although it came first.
    """

    key: int
    request: Request
    sample_index: int
    max_length: int
    table: PageTable
    leader: Sequence | None = None
    phase: Phase = Phase.WAITING
    slot: int | None = None
    num_computed: int = 0
    num_planned_outputs: int = 0
    num_in_flight: int = 0
    last_step: int = -1
    num_preemptions: int = 0
    host_pages: tuple[int, ...] = ()
    ahead: list[tuple[int, int]] = field(default_factory=list)
    num_dropped: int = 0
    keys: PageKeys = field(default_factory=PageKeys)
    branch: Branch | None = None
    num_kept: int = 0
    unnamed: list[Chunk] = field(default_factory=list)
    prefetched: set[int] = field(default_factory=set)
    num_outgrown: int = 0
    num_passed: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    finish_reason: FinishReason | None = None
    error: JaxserveError | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def planned_length(self) -> int:
        """Prompt and planned output tokens."""
        return self.prompt_length + self.num_planned_outputs

    @property
    def num_uncomputed(self) -> int:
        """Tokens without KV: 1 for a decoding sequence, more while its prefill lasts."""
        num_behind = self.planned_length - self.num_computed
        if not self.ahead:
            return num_behind
        return num_behind - sum(end - start for start, end in self.ahead)

    @property
    def num_outputs_left(self) -> int:
        return self.max_length - self.planned_length

    @property
    def num_known(self) -> int:
        """Prompt and output tokens that were read."""
        return self.prompt_length + len(self.output)

    @property
    def known_tokens(self) -> tuple[int, ...]:
        return (*self.request.prompt, *self.output) if self.output else self.request.prompt

    def begin_with(self, found: Collection[int], page_size: int) -> None:
        """Nothing is computed but these pages, by their index in the table."""
        self.num_computed = 0
        self.ahead = []
        for index in sorted(found):
            start, end = index * page_size, (index + 1) * page_size
            if self.ahead and self.ahead[-1][1] == start:
                self.ahead[-1] = (self.ahead[-1][0], end)
            else:
                self.ahead.append((start, end))
        self._pass_what_is_ahead()

    def next_spans(self, num_tokens: int, max_spans: int) -> list[tuple[int, int]]:
        """[start, end) of the next tokens to compute, between those that were found.

        Fewer than `num_tokens` where they lie in more than `max_spans`.
        """
        if not self.ahead and num_tokens and max_spans:
            return [(self.num_computed, self.num_computed + num_tokens)]
        spans: list[tuple[int, int]] = []
        starts = [self.num_computed, *(end for _, end in self.ahead)]
        ends = [*(start for start, _ in self.ahead), sys.maxsize]
        for start, end in zip(starts, ends, strict=True):
            if not num_tokens or len(spans) == max_spans:
                break
            spans.append((start, min(end, start + num_tokens)))
            num_tokens -= spans[-1][1] - start
        return spans

    def advance_to(self, end: int) -> None:
        """Everything before `end` is computed, or was found."""
        self.num_computed = end
        if self.ahead:
            self.ahead = [span for span in self.ahead if span[0] >= end]
            self._pass_what_is_ahead()

    def _pass_what_is_ahead(self) -> None:
        while self.ahead and self.ahead[0][0] == self.num_computed:
            self.num_computed = self.ahead.pop(0)[1]

    def forget_output(self) -> None:
        """Return to the prompt alone."""
        self.num_planned_outputs = 0
        self.keys = PageKeys()
        self.output.clear()
        self.logprobs.clear()
        self.prompt_logprobs.clear()
        self.first_token_s = None

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.params.prompt_logprobs is not None and self.sample_index == 0
