"""SLOs-Serve: requests whose bounds can be met go first, and the rest have what is left."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import numpy as np

from jaxserve.scheduling.iteration.continuous import Unified
from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.policy import QueueView, ServiceOrder, StepBuilder
from jaxserve.scheduling.sequence import Phase, Sequence


@final
@dataclass(frozen=True)
class Bounds:
    """Bounds of requests that have none of their own, and the time that a batch takes.

    A batch of n tokens takes `base_s + n * each_s`. The default is Llama-3 8B on an A100.

    Attributes:
      first_token_s, token_s: bounds of the first token, and of the mean of those after it.
      least_tokens: prompt tokens that a step may have whatever the bounds are.
    """

    first_token_s: float = 1.0
    token_s: float = 0.1
    base_s: float = 0.015
    each_s: float = 1e-4
    least_tokens: int = 16

    def due_s(self, sequence: Sequence) -> float:
        """Return when the first token is due."""
        request = sequence.request
        bound_s = request.params.first_token_bound
        due_s = request.arrival_s + (self.first_token_s if bound_s is None else bound_s)
        return due_s if request.due_s is None else min(due_s, request.due_s)

    def tightest_s(self, sequences: Iterable[Sequence]) -> float:
        own = (each.request.params.token_bound for each in sequences)
        return min((s for s in own if s is not None), default=self.token_s)

    def batch_tokens(self, seconds: float) -> int:
        """Return the tokens of a batch that takes at most so long."""
        return int(max(0.0, seconds - self.base_s) / self.each_s)


class Prompt(NamedTuple):
    """A prompt of `num_tokens` tokens; a promised one was admitted before."""

    due_s: float
    num_tokens: int
    is_promised: bool = False


def most_in_time(
    prompts: Seq[Prompt], now_s: float, num_decoding: int, batch_tokens: int, batch_s: float
) -> list[bool]:
    """Return which prompts to admit: as many as can be computed in time, with all promised ones.

    This is the dynamic program of SLOs-Serve (arXiv:2504.08784) for one bound of a token. Prompts
    are computed in the order in which they are due, in batches of `batch_tokens` tokens of which
    each running answer takes one. The state after some prompts is the number of those admitted, and
    its value is the most tokens for prompts that can be left.

    Args:
      num_decoding: answers that run; each admitted prompt adds one.
    """
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].due_s)
    num_new = sum(not each.is_promised for each in prompts)
    counts = np.arange(num_new + 1)
    left = np.where(counts == 0, 0.0, -np.inf)
    taken: list[tuple[int, np.ndarray]] = []
    before_s, num_promised = now_s, 0
    for index in order:
        prompt = prompts[index]
        rate = np.maximum(batch_tokens - num_decoding - num_promised - counts, 0) / batch_s
        left = left + max(0.0, prompt.due_s - before_s) * rate
        before_s = max(before_s, prompt.due_s)
        if prompt.is_promised:
            num_promised += 1
            left = left - prompt.num_tokens
            left[(left < 0.0) & (counts > 0)] = -np.inf  # without a new one it is late anyhow
            continue
        admitted = np.append(-np.inf, left[:-1] - prompt.num_tokens)
        has_room = num_decoding + num_promised + counts <= batch_tokens
        admitted[(admitted < 0.0) | ~has_room] = -np.inf
        taken.append((index, admitted > left))
        left = np.maximum(left, admitted)
    chosen = [each.is_promised for each in prompts]
    num = int(np.flatnonzero(np.isfinite(left))[-1])
    for index, is_taken in reversed(taken):
        if is_taken[num]:
            chosen[index] = True
            num -= 1
    return chosen


@final
@dataclass(frozen=True)
class SoftAdmission(ServiceOrder):
    """SLOs-Serve's soft admission (Chen et al., arXiv:2504.08784): best effort for the rest.

    When requests arrive, `most_in_time` decides which of them are admitted. These go first, by the
    time at which their first tokens are due, and no other preempts them once they run. The others
    are served by arrival with what is left, and preempted for admitted ones.

    Assumed, since only the abstract and summaries of the paper could be read: all answers have the
    tightest bound of a token, where the paper's program counts each tier of bounds; the pool's
    memory is not part of the program; the time of a batch is given, not fitted; there is no
    speculation; a decision is final; after `max_wait_s` a request goes before admitted ones, so
    that none starves. An engine also refuses requests with a bound of their own that they are
    expected to miss, as it does under every policy that heeds bounds.
    """

    heeds_bounds: ClassVar[bool] = True

    bounds: Bounds = Bounds()
    max_wait_s: float = 60.0

    def new_state(self) -> SoftAdmitted:
        return SoftAdmitted(self)


@final
class SoftAdmitted:
    """The requests of one scheduler that were admitted, and those that were not."""

    def __init__(self, how: SoftAdmission):
        self._bounds, self._max_wait_s = how.bounds, how.max_wait_s
        # None before it is decided.
        self._is_admitted: dict[Sequence, bool | None] = {}
        self._levels: dict[Sequence, int] = {}
        self._now_s = 0.0

    def is_admitted(self, sequence: Sequence) -> bool:
        return self._is_admitted.get(sequence) is True

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[int, float, int]:
        self._is_admitted.setdefault(sequence, None)
        level = self._levels[sequence] = self._level(sequence)
        arrival_s = sequence.request.arrival_s
        return level, self._bounds.due_s(sequence) if level == 1 else arrival_s, sequence.key

    def update(self, queue: QueueView) -> bool:
        self._now_s = queue.now_s
        for sequence in [each for each in self._levels if each.phase is Phase.FINISHED]:
            del self._is_admitted[sequence], self._levels[sequence]
        if None in self._is_admitted.values():
            self._decide(queue.now_s)
        return any(self._level(each) != level for each, level in self._levels.items())

    def _level(self, sequence: Sequence) -> int:
        if self._now_s - sequence.request.arrival_s >= self._max_wait_s:
            return 0
        if self._is_admitted[sequence] is False:
            return 2
        return 1 if sequence.times.admitted_s is None else 0

    def _decide(self, now_s: float) -> None:
        live = [each for each in self._is_admitted if each.phase is not Phase.CLOSING]
        batch_s = self._bounds.tightest_s(live)
        # A batch may be in flight, and the one with the last token of a prompt takes its time.
        margin_s = 2 * batch_s
        wanted: dict[Sequence, Prompt] = {}
        for each in live:
            if each.slot is not None and each.is_decoding:
                continue
            due_s, is_admitted = self._bounds.due_s(each) - margin_s, self._is_admitted[each]
            if is_admitted is not False:
                wanted[each] = Prompt(due_s, each.num_uncomputed, bool(is_admitted))
            elif each.slot is not None:  # a prompt that has begun is computed first
                wanted[each] = Prompt(now_s, each.num_uncomputed, is_promised=True)
        chosen = most_in_time(
            list(wanted.values()),
            now_s,
            sum(each.slot is not None and each.is_decoding for each in live),
            self._bounds.batch_tokens(batch_s),
            batch_s,
        )
        for each, is_chosen in zip(wanted, chosen, strict=True):
            if self._is_admitted[each] is None:
                self._is_admitted[each] = is_chosen


@final
@dataclass(frozen=True)
class WithinBounds:
    """Steps in which the running answers keep the tightest bound of a token among them.

    Every answer advances, and prompts have the tokens that the bound leaves, by `Bounds`.
    """

    num_device_groups: ClassVar[int] = 1
    makes_way = False
    reserved_slots = 0

    bounds: Bounds = Bounds()

    def new_state(self) -> None:
        return None

    def select(self, step: StepBuilder, state: None) -> None:
        bounds = self.bounds
        num_left = bounds.batch_tokens(bounds.tightest_s(step.running)) - len(step.decoding)
        shape = Unified(
            chunk_tokens=max(num_left, bounds.least_tokens), heeds_arrivals=True, preempts=True
        )
        shape.select(step, state)
