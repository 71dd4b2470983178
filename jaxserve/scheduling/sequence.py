"""One sample of a request between its submission and its end, and its pages."""

from __future__ import annotations

import enum
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import final

import numpy as np

from jaxserve.core.errors import JaxserveError
from jaxserve.core.request import FinishReason, Request, TokenLogprob
from jaxserve.memory.cached_page import Branch, CachedPage, PageKeys
from jaxserve.memory.grouped_table import GroupedPageTable
from jaxserve.memory.page_pool import PageTable
from jaxserve.memory.snapshots import Snapshot

# Pages of a waiting sequence that one step considers for prefetching.
MAX_LOOKED_AT = 512


@final
@dataclass(frozen=True, slots=True)
class SharedPages:
    """The last lookup of a sequence's pages: of `num_keys`, other sequences owned `num_pages`.

    `num_gained` is that of `PagePool` at the time.
    """

    num_keys: int
    num_pages: int
    num_gained: int


@final
@dataclass(eq=False, slots=True)
class Window:
    """The pages of a long prompt, at most `MAX_LOOKED_AT`, that one step considers for prefetching.

    The next step considers the same ones, or the next ones if none of these has to come.
    """

    start: int = 0
    branch: Branch | None = None
    # Of each window by its start: pages that were cached and copied at the last look.
    _num_copied: dict[int, int] = field(default_factory=dict)

    @property
    def num_copied_elsewhere(self) -> int:
        return sum(self._num_copied.values()) - self._num_copied.get(self.start, 0)

    def belong_to(self, branch: Branch) -> None:
        self.branch = branch

    def move(self, num_copied: int, num_pages: int) -> None:
        """Move to the next pages, wrapping around; `num_copied` of these are cached and copied."""
        self._num_copied[self.start] = num_copied
        self.start += MAX_LOOKED_AT
        if self.start >= num_pages:
            self.start = 0


@final
@dataclass(eq=False, slots=True)
class SequenceKV:
    """The KV state of a sequence. Only the KV manager writes it.

    Attributes:
      group: the device group in whose memory the pages are filled.
      num_computed: leading tokens whose KV is written by the steps planned so far, or was cached.
      ahead: [start, end) of later tokens whose KV was cached, in order.
      host_pages: pages of the host that hold its KV while it waits, by number in the page table;
        empty without any.
      num_dropped: tokens whose KV was dropped at the last preemption.
      num_outgrown: how often the sequence used up its reservation.
      num_cached: leading pages that are in the prefix cache.
      num_found: tokens of the prompt that were cached when the sequence was first admitted.
      unnamed: pages in the prefix cache whose last tokens have not been read yet.
      restores: the snapshot that the next plan copies into its slot; None without one.
      branch_point: where a plan ends a row and a snapshot is taken, since other sequences had the
        same tokens up to there; 0 for nowhere.
      grid_tokens: plans end rows after multiples of this many tokens, where snapshots are taken;
        None for nowhere.
      snapshots: those of its state; those without `page_keys` have tokens that were not read yet.
      prefetched: numbers of pages that came to the device while the sequence waited.
      awaits: the last of its pages that is still to come from the host, or None. Until then the
        sequence runs and computes nothing.
      is_mixed: whether former weights computed some of its KV, so that no other sequence may reuse
        it.
    """

    table: PageTable | GroupedPageTable
    group: int = 0
    num_computed: int = 0
    ahead: list[tuple[int, int]] = field(default_factory=list)
    host_pages: dict[int, int] = field(default_factory=dict)
    num_dropped: int = 0
    num_outgrown: int = 0
    keys: PageKeys = field(default_factory=PageKeys)
    branch: Branch | None = None
    num_cached: int = 0
    num_found: int = 0
    unnamed: list[CachedPage] = field(default_factory=list)
    restores: Snapshot | None = None
    branch_point: int = 0
    grid_tokens: int | None = None
    snapshots: list[Snapshot] = field(default_factory=list)
    prefetched: set[int] = field(default_factory=set)
    window: Window | None = None
    shared: SharedPages | None = None
    awaits: CachedPage | None = None
    is_mixed: bool = False

    def weights_changed(self) -> None:
        self.is_mixed = bool(self.table.num_pages or self.host_pages)

    @property
    def num_reserved_left(self) -> int:
        return self.table.num_reserved_tokens - self.num_computed

    def num_allowed(self, num_tokens: int) -> int:
        """Return how many of the next tokens one plan may compute, up to the next snapshot."""
        start = self.num_computed
        end = min(start + num_tokens, self.table.max_end)
        if start < self.branch_point:
            end = min(end, self.branch_point)
        if self.grid_tokens is not None and end // self.grid_tokens > start // self.grid_tokens:
            end -= end % self.grid_tokens
        return max(0, end - start)

    def begin_with(self, cached: Collection[int], page_size: int) -> None:
        """Set exactly these pages, by their index in the table, as computed."""
        self.num_computed = 0
        self.ahead = []
        for index in sorted(cached):
            start, end = index * page_size, (index + 1) * page_size
            if self.ahead and self.ahead[-1][1] == start:
                self.ahead[-1] = (self.ahead[-1][0], end)
            else:
                self.ahead.append((start, end))
        self._pass_what_is_ahead()

    def next_spans(self, num_tokens: int, max_spans: int) -> list[tuple[int, int]]:
        """Return [start, end) of the next tokens to compute, between cached ones."""
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
        """Record that everything before `end` is computed, or was cached."""
        self.num_computed = end
        if self.ahead:
            self.ahead = [span for span in self.ahead if span[0] >= end]
            self._pass_what_is_ahead()

    def forget_tokens(self) -> None:
        """Keep the prompt alone; other tokens may follow it."""
        self.keys = self.keys.anew()
        self.shared = None

    def close(self) -> None:
        self.table.close()
        self.ahead.clear()
        self.awaits = self.restores = None

    def _pass_what_is_ahead(self) -> None:
        while self.ahead and self.ahead[0][0] == self.num_computed:
            self.num_computed = self.ahead.pop(0)[1]


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

    def set_first_token(self, now_s: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = now_s


@final
@dataclass(eq=False)
class SequenceScores:
    """Log-probabilities of output tokens and, by position, of prompt tokens, if requested."""

    output: list[TokenLogprob] = field(default_factory=list)
    prompt: dict[int, TokenLogprob] = field(default_factory=dict)


@final
@dataclass(eq=False)
class PooledPrompt:
    """The pooled hidden states of a prompt: of its last `num_wanted` tokens, all of them or one.

    A token counts once, also if a preemption has it computed again.
    """

    prompt_length: int
    num_wanted: int
    num_planned: int = 0
    num_read: int = 0
    summed: np.ndarray | None = None

    def plan(self, start: int, end: int) -> int:
        """Return how many of the last tokens of the row [start, end) to pool."""
        first = self.prompt_length - self.num_wanted + self.num_planned
        num = max(0, end - max(start, first))
        self.num_planned += num
        return num

    def add(self, num_tokens: int, state: np.ndarray) -> None:
        self.num_read += num_tokens
        self.summed = state if self.summed is None else self.summed + state

    def drop(self) -> None:
        self.num_planned, self.num_read, self.summed = 0, 0, None

    @property
    def is_whole(self) -> bool:
        return self.num_read == self.num_wanted

    @property
    def mean(self) -> np.ndarray | None:
        """Return float32 [width]; None before all is read."""
        if self.summed is None or not self.is_whole:
            return None
        return self.summed / np.float32(self.num_wanted)


@final
@dataclass(eq=False)
class Sequence:
    """Identity, tokens and phase of a sequence, which only its methods write.

    Only the scheduler calls those that change it.

    The device is ahead of what the host has read, so there are two counts of output tokens: those
    known (`output`) and those planned (`num_planned_outputs`, known plus in flight). What is
    planned is a bound: if a step delivers fewer tokens, the difference is taken back.

    Attributes:
      key: unique within a scheduler; names the sequence in plans.
      max_length: the most prompt and output tokens together.
      primary: the request's first sample, whose prompt pages this one shares; None for itself.
      slot: row of the device batch while it runs.
      is_released: whether nothing binds its tokens any more, so that it does not await them.
      falls_short: whether a step has delivered fewer tokens than planned before the answer's end.
        Such a sequence keeps its slot and pages until its last token has been read.
      num_in_flight: rows of submitted steps that have not been read.
      pooled: for a request that pools, which has no output; None for others.
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
    is_released: bool = False
    falls_short: bool = False
    num_preemptions: int = 0
    num_lost: int = 0
    scores: SequenceScores = field(default_factory=SequenceScores)
    pooled: PooledPrompt | None = None
    times: SequenceTimes = field(default_factory=SequenceTimes)
    finish_reason: FinishReason | None = None
    error: JaxserveError | None = None

    @property
    def awaits_tokens(self) -> bool:
        """Whether each of its tokens must be read before the next one is chosen."""
        return self.request.awaits_tokens and not self.is_released

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
        if self.pooled is not None:
            return False
        if self.num_uncomputed == 1:
            return True
        return self.awaits_tokens and self.kv.num_computed >= self.prompt_length

    @property
    def is_planned(self) -> bool:
        """Whether every step that it needs is planned, unless a step falls short."""
        if self.num_outputs_left or self.falls_short:
            return False
        return self.pooled is None or not self.num_uncomputed

    @property
    def awaits_token(self) -> bool:
        """Whether a token in flight must be read before its next step can be planned."""
        return self.awaits_tokens and self.num_planned_outputs > len(self.output)

    @property
    def may_grow(self) -> bool:
        """Whether a token may be planned: its pages are resident, and it is below its limit."""
        if self.kv.awaits is not None or self.awaits_token:
            return False
        return not self.falls_short or self.planned_length < self.max_length

    @property
    def is_steady(self) -> bool:
        """Whether every step has given a running answer its planned tokens: it keeps decoding."""
        is_answer = self.slot is not None and self.num_planned_outputs > 0
        return is_answer and not (self.falls_short or self.awaits_tokens)

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

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every token of the prompt must be computed for it, also those of cached pages."""
        if self.pooled is not None:
            return self.pooled.num_wanted > 1
        return self.wants_prompt_logprobs

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts of tokens agree, before its end."""
        if self.phase is not Phase.FINISHED:
            num_unread = self.num_planned_outputs - len(self.output)
            assert num_unread >= 0, "more tokens came than were planned"
            assert self.num_in_flight or not num_unread, "tokens are planned for ever"
            assert self.num_outputs_left >= 0, "more tokens are planned than it may have"
            is_one_step = num_unread <= 1 or self.num_in_flight <= 1
            assert is_one_step or not self.awaits_tokens, "it runs ahead of tokens that it awaits"

    # ---- changes ----

    def wait(self) -> None:
        self.phase = Phase.WAITING

    def run(self, slot: int, now_s: float) -> None:
        self.slot, self.phase = slot, Phase.RUNNING
        if self.times.admitted_s is None:
            self.times.admitted_s = now_s

    def limit(self, max_length: int) -> None:
        self.max_length = max_length

    def move_to(self, slot: int | None) -> None:
        self.slot = slot

    def preempt(self) -> None:
        self.num_preemptions += 1
        self.phase = Phase.WAITING

    def close(self) -> None:
        self.phase = Phase.CLOSING

    def finish(self, reason: FinishReason, error: JaxserveError | None, now_s: float) -> None:
        self.phase = Phase.FINISHED
        self.finish_reason, self.error = reason, error
        self.times.finished_s = now_s
        if self.output:
            self.times.set_first_token(now_s)  # if all tokens were forced

    def submitted(self) -> None:
        """Record that a row of it is in flight."""
        self.num_in_flight += 1

    def read(self) -> None:
        """Record that a row in flight has been read."""
        self.num_in_flight -= 1

    def handed_over(self, *, is_lost: bool) -> None:
        self.num_lost = self.num_lost + 1 if is_lost else 0

    def plan(self, num_outputs: int, *, may_fall_short: bool = False) -> None:
        """Record that a step was planned, which delivers at most `num_outputs` tokens."""
        self.num_planned_outputs += num_outputs
        self.falls_short |= may_fall_short

    def take_back(self, num_outputs: int) -> None:
        """Record that a step delivered `num_outputs` tokens fewer than planned."""
        self.falls_short = True
        self.num_planned_outputs -= num_outputs

    def append(self, tokens: Iterable[int], scores: Iterable[TokenLogprob]) -> None:
        """Append planned tokens that a step has delivered, with their scores if requested."""
        self.output += tokens
        self.scores.output += scores

    def release(self) -> None:
        self.is_released = True

    def force(self, token: int) -> None:
        """Append a token that is certain, and was not planned."""
        self.output.append(token)
        self.num_planned_outputs += 1

    def cut(self, num_outputs: int, reason: FinishReason, error: JaxserveError | None) -> None:
        """Drop the tokens after the first `num_outputs`; if it has ended, it did so with these."""
        del self.output[num_outputs:]
        del self.scores.output[num_outputs:]
        if self.phase is Phase.FINISHED:
            self.finish_reason, self.error = reason, error

    def drop_output(self) -> None:
        self.num_planned_outputs, self.is_released = 0, False
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
