"""A request on the move: its tokens, its pages, its slot."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import final

from jaxserve.core.errors import JaxserveError
from jaxserve.core.request import FinishReason, Request, TokenLogprob
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
      num_computed: tokens whose KV is written by the steps planned so far.
      last_step: index of the newest step with a row of it, or of the last one before its admission
        where it had none since.
      num_in_flight: steps submitted that may still deliver tokens of it.
      host_pages: of the host, where its KV waits while it does not run; empty if it waits nowhere.
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
        return self.planned_length - self.num_computed

    @property
    def num_outputs_left(self) -> int:
        return self.max_length - self.planned_length

    @property
    def known_tokens(self) -> tuple[int, ...]:
        return (*self.request.prompt, *self.output)

    def forget_output(self) -> None:
        """Back to the prompt alone."""
        self.num_planned_outputs = 0
        self.output.clear()
        self.logprobs.clear()
        self.prompt_logprobs.clear()
        self.first_token_s = None

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.params.prompt_logprobs is not None and self.sample_index == 0
