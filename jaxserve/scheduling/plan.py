"""The plan that an executor carries out, and its result. NumPy only."""

from __future__ import annotations

import enum
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np

from jaxserve.core.request import Request
from jaxserve.memory.snapshots import HostStateCopy, StateCopy


@final
@dataclass(frozen=True)
class Admission:
    """A slot begins to serve a sequence.

    Attributes:
      tokens: int32 [known tokens], prompt and, after a preemption, the output so far.
      max_length: the device ends the sequence when it has `request.end_length(...)` tokens.
    """

    slot: int
    request: Request
    sample_index: int
    tokens: np.ndarray
    max_length: int


@final
@dataclass(frozen=True)
class Row:
    """`num_tokens` tokens of one slot from position `start` on, taken from the slot's own history.

    A row that samples ends at the slot's newest token, and the step appends new ones: at most
    `max_new_tokens`, and fewer if the answer ends or the device accepts fewer. So `start` is an
    upper bound, too, until the steps before have been read. The device computes a sampling row's
    last token at the end of the slot's history, and a row that fell short continues from there; a
    row that reaches beyond the history and does not sample is inert.

    Attributes:
      max_new_tokens: 0 for a row that does not sample.
      encodes: the encoder computes the row, a whole prompt without its padding.
      num_pooled: its last tokens whose hidden states are pooled.
      proposed: its last tokens, if the slot's history does not have them yet. The step chooses a
        token before and after each of them, and the history continues with the chosen tokens as far
        as they equal the proposed ones, and with one more.
    """

    slot: int
    sequence_key: int
    start: int
    num_tokens: int
    max_new_tokens: int
    wants_prompt_logprobs: bool = False
    encodes: bool = False
    proposed: tuple[int, ...] = ()
    num_pooled: int = 0

    @property
    def samples(self) -> bool:
        """Whether the step may append tokens to the slot."""
        return self.max_new_tokens > 0


@final
@dataclass(frozen=True)
class Handover:
    """KV of one sequence that moves between device groups; pages have the same number in each."""

    sequence_key: int
    source: int
    target: int
    pages: tuple[int, ...]


# The `StepPlan.group` of plans that hand KV over: the link between the groups, which is busy
# during the handovers, independently of the groups' steps.
LINK = -1


@final
@dataclass(frozen=True)
class Extension:
    """Tokens that follow a slot's newest one with certainty, from position `start` on.

    They end the slot's history; nothing of the slot is in flight.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]


@final
class TokenMasks:
    """The tokens that some rows of a plan may choose; computed while the step's body runs.

    An object that is pickled has its masks when it arrives.

    Args:
      rows: indices of the plan's rows that have a mask; a row with proposals is repeated for each
        place where the step chooses a token.
      words: uint32 [rows, words]: bit t % 32 of word t // 32 says whether token t is allowed.
    """

    def __init__(self, rows: tuple[int, ...], words: Future[np.ndarray]):
        self.rows = rows
        self._words = words

    @classmethod
    def begin(
        cls, rows: tuple[int, ...], compute: Callable[[], np.ndarray], pool: Executor
    ) -> Self:
        return cls(rows, pool.submit(compute))

    def words(self) -> np.ndarray:
        return self._words.result()

    def __reduce__(self) -> tuple[Any, ...]:
        return _known_masks, (self.rows, self.words())


def _known_masks(rows: tuple[int, ...], words: np.ndarray) -> TokenMasks:
    known: Future[np.ndarray] = Future()
    known.set_result(words)
    return TokenMasks(rows, known)


# (from, to), in the order in which they are made.
PageCopies = tuple[tuple[int, int], ...]
# Likewise, from slots to snapshots, and between snapshots and the host.
StateCopies = tuple[StateCopy | HostStateCopy, ...]


@final
@dataclass(frozen=True)
class StepPlan:
    """One step, carried out in the order of the fields, except `restores`.

    A plan depends on lengths only, never on token values, so it can be submitted before the
    previous step has been read. It is an upper bound: rows may deliver fewer tokens than they may
    sample, and the scheduler takes back what did not come. Slots that ended on the device in the
    meantime are inert: their rows write to the null page and deliver nothing.

    Attributes:
      index: of the plan among its scheduler's.
      saves: states and pages to be copied to snapshots, as the plan before has left them, and
        snapshots to be copied to the host or from it, in this order.
      swaps_out: (device page, host page), contents to be kept on the host.
      swaps_in: (host page, device page), contents that come back.
      restores: snapshots to be copied to slots and pages, after all other edits.
      forgets_answers: whether no later proposal may be of an answer that has already ended.
      releases: slots that serve no sequence from now on.
      moves: (from, to) slots, compaction; every `to` is free and every `from` becomes free.
      admissions: slots that begin to serve a sequence.
      extensions: tokens that slots get without having been chosen by the model.
      page_updates: (slot, number in the slot's page tables (`PageLayout`), page).
      rows: the step's work. In a mixed step a sequence may have several, of increasing positions:
        its pages already have what is between them (thesis, section 3.4.3.4). A row may read what
        rows before it write.
      num_iterations: 1 for a mixed step; N for a decode loop (each row one token, sampling).
      num_proposed: tokens that an iteration of a decode loop may compute speculatively, of all rows
        together; with stages, of those of each micro-batch. 0 for a loop that does not speculate.
      verify_cost: measured time of such an iteration, in units of one without proposals.
      window_start, window_size: the slots that a decode loop runs over; size 0 for a mixed step.
      handovers: KV that moves from group to group. A plan has either handovers or rows, and reads
        what earlier plans have written that were collected before it was submitted.
      group: devices that carry the plan out, in order with their other plans; 0 for the only group,
        `LINK` for handovers. Slots are a group's own.
      masks: which tokens rows of a mixed step may choose; None if all of them may choose any.
    """

    index: int
    saves: StateCopies = ()
    swaps_out: PageCopies = ()
    swaps_in: PageCopies = ()
    restores: tuple[StateCopy, ...] = ()
    forgets_answers: bool = False
    releases: tuple[int, ...] = ()
    moves: tuple[tuple[int, int], ...] = ()
    admissions: tuple[Admission, ...] = ()
    extensions: tuple[Extension, ...] = ()
    page_updates: tuple[tuple[int, int, int], ...] = ()
    rows: tuple[Row, ...] = ()
    num_iterations: int = 1
    num_proposed: int = 0
    verify_cost: float = 1.0
    window_start: int = 0
    window_size: int = 0
    handovers: tuple[Handover, ...] = ()
    group: int = 0
    masks: TokenMasks | None = None

    @property
    def is_decode_loop(self) -> bool:
        return self.window_size > 0

    @property
    def has_proposals(self) -> bool:
        return any(row.proposed for row in self.rows)

    @property
    def num_states_swapped(self) -> int:
        """States that are copied to the host or from it."""
        num = sum(isinstance(copy, HostStateCopy) for copy in self.saves)
        return num + sum(copy.is_on_host for copy in self.restores)

    @property
    def num_pages_handed_over(self) -> int:
        return sum(len(handover.pages) for handover in self.handovers)

    @property
    def num_encoded(self) -> int:
        """Tokens that the encoder computes, in programs of its own."""
        return sum(row.num_tokens for row in self.rows if row.encodes)

    @property
    def num_tokens(self) -> int:
        """Maximum of tokens computed: prefilled, decoded and proposed ones.

        With stages, the proposed ones are of one micro-batch.
        """
        tokens = sum([row.num_tokens for row in self.rows])  # a generator would be resumed a row
        return self.num_iterations * (tokens + self.num_proposed)


@final
@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of one row: entry i is of the token at position `start + i + 1`.

    logprobs and processed_logprobs f32 [tokens], top_ids i32 [tokens, MAX_LOGPROBS], top_logprobs
    f32 likewise.
    """

    logprobs: np.ndarray
    processed_logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


class ProposalCount(enum.IntEnum):
    """What a decode loop that speculates counts in each row.

    DRAFTS are iterations that computed proposals of the row, PROPOSED the proposals computed, and
    ITERATIONS those in which the row took part; WIDE ones computed proposals of some row. After
    these come, for each place in a draft, the proposals there that were right.
    """

    DRAFTS = 0
    PROPOSED = 1
    ITERATIONS = 2
    WIDE = 3


@final
@dataclass(frozen=True)
class StepResult:
    """Tokens of one step, row by row in the plan's order.

    Attributes:
      tokens: int32 [rows, tokens].
      num_tokens: int32 [rows], how many of them are valid: at most the row's `max_new_tokens`.
      finite: bool [rows], False if the model's logits were not.
      logprobs, processed_logprobs: float32 [rows, tokens], before and after processors, or None if
        no row asked.
      top_ids, top_logprobs: [rows, tokens, MAX_LOGPROBS], or None.
      prompt_logprobs: row index -> its prompt log-probabilities.
      pooled: row index -> float32 [width], the sum of the row's pooled hidden states, or the logits
        of the model's labels.
      remaining: float32 [rows, buckets], what a probe read at the choice of each sampling row's
        last token: logits of the number of tokens still to come, that one included. None without a
        probe; undefined in rows that did not sample.
      arrived: bool [handovers], False if pages did not arrive; None if all did.
      proposals: int32 [rows, counts], by `ProposalCount`; None except for decode loops that
        speculate.
    """

    tokens: np.ndarray
    num_tokens: np.ndarray
    finite: np.ndarray
    logprobs: np.ndarray | None = None
    processed_logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    prompt_logprobs: dict[int, PromptLogprobs] | None = None
    pooled: dict[int, np.ndarray] | None = None
    remaining: np.ndarray | None = None
    arrived: np.ndarray | None = None
    proposals: np.ndarray | None = None


def nothing_delivered(plan: StepPlan) -> StepResult:
    """Return the result of a plan that was not carried out: no tokens, and no pages arrived."""
    num_rows = len(plan.rows)
    return StepResult(
        np.zeros((num_rows, 1), np.int32),
        np.zeros(num_rows, np.int32),
        np.ones(num_rows, np.bool_),
        arrived=np.zeros(len(plan.handovers), np.bool_),
    )


def nothing_computed(arrived: np.ndarray | None = None) -> StepResult:
    return StepResult(
        np.zeros((0, 0), np.int32), np.zeros(0, np.int32), np.zeros(0, np.bool_), arrived=arrived
    )
