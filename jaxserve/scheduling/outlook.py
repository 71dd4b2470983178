"""When answers that have not ended are expected to end."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np

from jaxserve.scheduling.forecast import Forecast
from jaxserve.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from jaxserve.scheduling.scheduler import Scheduler


@final
@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What is expected of a request that has not ended, given the tokens that have come.

    By its predicted length where there is a prediction, else as if it went to its limit. Of its
    samples the first to begin counts, the last to end, and the tokens of all.

    Attributes:
      num_tokens: of the output, still to come.
      begins_in_s: 0 for one that runs; None, as below, before any step was timed.
      ends_in_s: if no other request came.
    """

    num_tokens: float
    begins_in_s: float | None
    ends_in_s: float | None


def outlooks(scheduler: Scheduler, iteration_s: float | None) -> dict[str, Outlook]:
    """Of all requests that have tokens left to compute, by id.

    Those that wait begin in the policy's order, as slots and memory become free; every iteration
    advances all that run.

    Args:
      iteration_s: what one takes; None where that is not known yet.
    """
    config, num_running = scheduler.config, len(scheduler.running)
    sequences = [*scheduler.running, *scheduler.waiting]
    tokens = _expected_tokens(sequences)
    pages = [_pages(scheduler, *each) for each in zip(sequences, tokens, strict=True)]
    # Iterations that each runs for; then, from now, when it begins and ends.
    lasts = [
        each.num_uncomputed / config.max_step_tokens + more
        for each, more in zip(sequences, tokens, strict=True)
    ]
    begins, ends = [0.0] * num_running, lasts[:num_running]
    # Of those that run: (when it ends, its pages).
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

    def seconds(iterations: float) -> float | None:
        return None if iteration_s is None else iterations * iteration_s

    samples: dict[str, list[int]] = {}
    for i, sequence in enumerate(sequences):
        samples.setdefault(sequence.request.id, []).append(i)
    return {
        name: Outlook(
            num_tokens=sum(tokens[i] for i in which),
            begins_in_s=seconds(min(begins[i] for i in which)),
            ends_in_s=seconds(max(ends[i] for i in which)),
        )
        for name, which in samples.items()
    }


def _pages(scheduler: Scheduler, sequence: Sequence, num_tokens: float) -> int:
    """Reserved, or to be; where memory is taken as tokens come, the mean until the end."""
    if scheduler.policy.admission.extends:
        return sequence.kv.table.pages_for(int(sequence.planned_length + num_tokens / 2))
    return sequence.kv.table.reservation or sequence.kv.table.pages_for(
        scheduler.tokens_to_reserve(sequence)
    )


def _expected_tokens(sequences: list[Sequence]) -> list[float]:
    """Output tokens that are still to come of each."""
    forecast = Forecast.of(sequences) if sequences else None
    if forecast is None:
        return [float(sequence.num_outputs_left) for sequence in sequences]
    expected = forecast.expected_remaining()
    unknown = np.asarray([sequence.prediction is None for sequence in sequences])
    limits = np.asarray([sequence.num_outputs_left for sequence in sequences], np.float64)
    return np.where(unknown, limits, expected).tolist()
