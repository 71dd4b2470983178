"""When requests that have not ended are expected to begin and to end."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence

# A simulation of the queue is reused until it has one change for this many of its sequences.
_SEQUENCES_A_CHANGE = 256


@final
@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The expected rest of a request that has not ended, given the tokens that it has so far.

    A request without a prediction counts as long as its limit. Of several samples, the first to
    begin and the last to end count, and the tokens of all. Before any step was timed, times are
    None.

    Attributes:
      num_tokens: output tokens still to come.
      begins_in_s: 0 for a request that runs.
      ends_in_s: if no other request arrives.
    """

    num_tokens: float
    begins_in_s: float | None
    ends_in_s: float | None


def outlooks(
    scheduler: Scheduler, iteration_s: float | None, *, without: Collection[Sequence] = ()
) -> dict[str, Outlook]:
    """Return the outlook of every request that has tokens left to compute, by id.

    Waiting sequences are assumed to begin in the policy's order, as slots and memory become free,
    and every iteration, of `iteration_s` seconds, to advance all running ones. The running
    sequences `without` count as ended, and get no outlook.
    """
    queue = expected_queue(scheduler, without)

    def seconds(iterations: float) -> float | None:
        return None if iteration_s is None else iterations * iteration_s

    samples: dict[str, list[int]] = {}
    for i, sequence in enumerate(queue.sequences):
        samples.setdefault(sequence.request.id, []).append(i)
    return {
        name: Outlook(
            num_tokens=sum(queue.tokens[i] for i in which),
            begins_in_s=seconds(min(queue.begins[i] for i in which)),
            ends_in_s=seconds(max(queue.ends[i] for i in which)),
        )
        for name, which in samples.items()
    }


class ExpectedQueue(NamedTuple):
    """When sequences, running ones first, begin and end, in iterations from now."""

    sequences: list[Sequence]
    tokens: list[float]
    begins: list[float]
    ends: list[float]


def expected_queue(scheduler: Scheduler, without: Collection[Sequence]) -> ExpectedQueue:
    """Return when the sequences of a scheduler begin and end, as `outlooks` assumes."""
    running = [each for each in scheduler.running if each not in without]
    config, num_running = scheduler.config, len(running)
    sequences = [*running, *scheduler.waiting]
    tokens = scheduler.lengths.expected_tokens(sequences)
    pages = [_pages(scheduler, *each) for each in zip(sequences, tokens, strict=True)]
    lasts = expected_iterations(sequences, tokens, config)
    begins, ends = [0.0] * num_running, lasts[:num_running]
    # (its end, its pages) of each running sequence.
    busy = list(zip(ends, pages, strict=False))
    heapq.heapify(busy)
    num_free = scheduler.page_usage().num_usable - sum(pages[:num_running])
    now = 0.0
    for i in range(num_running, len(sequences)):
        while busy and (len(busy) >= config.max_slots or pages[i] > num_free):
            now, freed = heapq.heappop(busy)
            num_free += freed
        begins.append(now)
        ends.append(now + lasts[i])
        heapq.heappush(busy, (ends[i], pages[i]))
        num_free -= pages[i]
    return ExpectedQueue(sequences, tokens, begins, ends)


def expected_iterations(
    sequences: Seq[Sequence], tokens: Seq[float], config: EngineConfig
) -> list[float]:
    return [
        each.num_uncomputed / config.max_step_tokens + more
        for each, more in zip(sequences, tokens, strict=True)
    ]


def _pages(scheduler: Scheduler, sequence: Sequence, num_tokens: float) -> int:
    """Return the pages that are or will be reserved; the mean until the end where they grow."""
    if scheduler.policy.admission.extends:
        return sequence.kv.table.pages_for(int(sequence.planned_length + num_tokens / 2))
    return sequence.kv.table.reservation or sequence.kv.table.pages_for(
        scheduler.tokens_to_reserve(sequence)
    )


@final
class ArrivalOutlook:
    """Simulates the queue for requests that arrive, at a bounded cost for each.

    With fewer than `_SEQUENCES_A_CHANGE` waiting sequences each request has a simulation of its
    own. In a longer queue one simulation serves several arrivals and steps: a request begins when
    the first sequence after it was to begin, and those that arrived since do not count; they are at
    most one in `_SEQUENCES_A_CHANGE`.
    """

    def __init__(self) -> None:
        self._num_changes = 0
        # Of the newest simulation: the sequences that wait, by their place in the policy's order,
        # when they begin in iterations, and the running ones that count as ended.
        self._places: list[Any] = []
        self._begins: list[float] = []
        self._without: Collection[Sequence] = ()

    def step(self) -> None:
        self._num_changes += 1

    def of(
        self,
        scheduler: Scheduler,
        samples: Seq[Sequence],
        iteration_s: float,
        without: Collection[Sequence],
        *,
        at_once: bool = False,
    ) -> Outlook:
        """Return the outlook of a request that was just added; `at_once` ignores what waits."""
        self._num_changes += 1
        if not at_once and self._is_stale(scheduler, without):
            self._simulate(scheduler, without)
        tokens = scheduler.lengths.expected_tokens(samples)
        lasts = expected_iterations(samples, tokens, scheduler.config)
        places = [] if at_once else [scheduler.order_keys.of(each) for each in samples]
        begins = [self._begins[self._index(each)] for each in places] or [0.0] * len(samples)
        ends = [start + more for start, more in zip(begins, lasts, strict=True)]
        return Outlook(
            num_tokens=sum(tokens),
            begins_in_s=min(begins) * iteration_s,
            ends_in_s=max(ends) * iteration_s,
        )

    def _index(self, place: Any) -> int:
        """Return the index of the first sequence at or after a place, or of the last one."""
        return min(bisect.bisect_left(self._places, place), len(self._places) - 1)

    def _is_stale(self, scheduler: Scheduler, without: Collection[Sequence]) -> bool:
        num_simulated = len(self._places)
        num_changes = max(self._num_changes, abs(scheduler.num_waiting - num_simulated))
        return num_changes * _SEQUENCES_A_CHANGE > num_simulated or without != self._without

    def _simulate(self, scheduler: Scheduler, without: Collection[Sequence]) -> None:
        queue = expected_queue(scheduler, without)
        num_running = len(scheduler.running) - len(without)
        self._places = [scheduler.order_keys.of(each) for each in queue.sequences[num_running:]]
        self._begins = queue.begins[num_running:]
        self._without = without
        self._num_changes = 0
