"""When answers that have not ended are expected to end."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from jaxserve.scheduling.scheduler import Scheduler


@final
@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The expected rest of a request that has not ended, given the tokens that it has so far.

    A request without a prediction is taken to go to its limit. Of several samples, the first to
    begin and the last to end count, and the tokens of all.

    Attributes:
      num_tokens: output tokens still to come.
      begins_in_s: 0 for a request that runs; None before any step was timed.
      ends_in_s: if no other request arrives; None before any step was timed.
    """

    num_tokens: float
    begins_in_s: float | None
    ends_in_s: float | None


def outlooks(
    scheduler: Scheduler, iteration_s: float | None, *, without: Collection[Sequence] = ()
) -> dict[str, Outlook]:
    """Return the outlook of every request that has tokens left to compute, by id.

    Waiting sequences are taken to begin in the policy's order, as slots and memory become free, and
    every iteration to advance all running ones.

    Args:
      iteration_s: seconds of one iteration; None before any step was timed.
      without: running sequences that are taken as gone, and get no outlook.
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
    """When sequences are expected to begin and to end, in iterations from now.

    Attributes:
      sequences: those that run, then those that wait in the policy's order.
      tokens: output tokens still to come of each.
      begins: 0 for those that run.
    """

    sequences: list[Sequence]
    tokens: list[float]
    begins: list[float]
    ends: list[float]


def expected_queue(scheduler: Scheduler, without: Collection[Sequence]) -> ExpectedQueue:
    """Return when the sequences of a scheduler begin and end; see `outlooks`."""
    running = [each for each in scheduler.running if each not in without]
    config, num_running = scheduler.config, len(running)
    sequences = [*running, *scheduler.waiting]
    tokens = scheduler.lengths.expected_tokens(sequences)
    pages = [_pages(scheduler, *each) for each in zip(sequences, tokens, strict=True)]
    lasts = expected_iterations(sequences, tokens, config)
    begins, ends = [0.0] * num_running, lasts[:num_running]
    # (when it ends, its pages) of each running sequence.
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
    """Return the iterations that each sequence runs for, with these tokens still to come."""
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
