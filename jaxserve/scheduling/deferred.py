"""Requests with a latency bound: which are refused at their submission, and while they wait."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import final

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import BoundNotMetError
from jaxserve.scheduling.lengths.arrival_outlook import ArrivalOutlook
from jaxserve.scheduling.lengths.bounds import expected_late, leeway, too_late
from jaxserve.scheduling.pace import Pace
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Phase, Sequence

# Entries that count no more, at least, before they are removed.
_MANY_OLD = 64


@final
class Deferred:
    """Refuses requests that would miss a latency bound of their own, unless they have begun.

    A request is looked at again when its `Leeway` ends, so a step costs as much as the requests
    that may be too late at that time, not as all that wait.
    """

    def __init__(self) -> None:
        self._outlook = ArrivalOutlook()
        # Those that were accepted, by number, in the order of submission; some have begun or ended.
        self._samples: dict[int, Seq[Sequence]] = {}
        self._num_added = self._num_kept = 0
        # Those without a leeway.
        self._unknown: list[int] = []
        # By time, by seconds of an iteration and by those of one with prompts.
        self._ends = (_Ends(), _Ends(), _Ends())
        # The sizes that the leeways were computed with.
        self._config: EngineConfig | None = None

    def add(
        self, scheduler: Scheduler, samples: Seq[Sequence], pace: Pace | None, now_s: float
    ) -> BoundNotMetError | None:
        """Take the samples of a request that was submitted, or return why it is refused.

        Args:
          pace: see `expected_late`.
        """
        has_slots = self._has_reserved_slots(scheduler, len(samples))
        error = expected_late(
            scheduler, samples, pace, now_s, self._outlook, begins_at_once=has_slots
        )
        if error is not None:
            return error
        if len(self._samples) > 2 * self._num_kept + _MANY_OLD:
            self._samples = {n: each for n, each in self._samples.items() if _waits(each)}
            self._num_kept = len(self._samples)
        self._samples[self._num_added] = samples
        self._unknown.append(self._num_added)
        self._num_added += 1
        return None

    def _has_reserved_slots(self, scheduler: Scheduler, num_samples: int) -> bool:
        """Whether slots are free that only requests with a bound may take, for one more of them."""
        num_reserved = scheduler.policy.iteration.reserved_slots
        if not num_reserved:
            return False
        num_taken = sum(each.request.has_bounds for each in scheduler.running)
        num_taken += sum(len(each) for each in self._samples.values() if _waits(each))
        return num_taken + num_samples <= num_reserved

    def late(
        self, scheduler: Scheduler, pace: Callable[[], Pace | None], now_s: float
    ) -> Iterator[tuple[Sequence, BoundNotMetError]]:
        """Yield each sequence that would miss its bound if it began now, with its error.

        Where nothing runs, the pace may be that of long ago; only a bound that has passed counts.
        """
        self._outlook.step()
        newest = pace() if self._samples else None
        if newest is None:
            return
        known = newest if scheduler.running else None
        for number in self._due(scheduler.config, newest, now_s):
            samples = self._samples[number]
            if not _waits(samples):
                del self._samples[number]
                continue
            error = too_late(samples, scheduler.lengths, scheduler.config, known, now_s)
            if error is None:
                found = leeway(samples, scheduler.lengths, scheduler.config, newest, now_s)
                for ends, at in zip(self._ends, found, strict=True):
                    ends.put(number, at)
                continue
            del self._samples[number]
            for sequence in samples:
                yield sequence, error

    def _due(self, config: EngineConfig, pace: Pace, now_s: float) -> list[int]:
        """Return the numbers of the requests whose leeway has ended, in the order of submission."""
        if config is not self._config:
            self._config, self._unknown = config, list(self._samples)
        due = set(self._unknown)
        self._unknown = []
        values = now_s, pace.fastest_s, pace.prefill_s
        for ends, value in zip(self._ends, values, strict=True):
            due.update(ends.reached(value, self._samples))
        return sorted(due & self._samples.keys())


@final
class _Ends:
    """The values at which leeways end, the lowest first."""

    def __init__(self) -> None:
        self._newest: dict[int, float] = {}
        # (value, number); one counts if its value is the newest of its number.
        self._heap: list[tuple[float, int]] = []

    def put(self, number: int, at: float) -> None:
        """Set where the leeway of a request ends."""
        if self._newest.get(number) != at:
            self._newest[number] = at
            heapq.heappush(self._heap, (at, number))

    def reached(self, value: float, present: dict[int, Seq[Sequence]]) -> Iterator[int]:
        """Yield the requests whose leeway ends at `value` or before it; those have none then."""
        if len(self._heap) > 2 * len(present) + _MANY_OLD:
            self._newest = {n: at for n, at in self._newest.items() if n in present}
            self._heap = [(at, n) for n, at in self._newest.items()]
            heapq.heapify(self._heap)
        while self._heap and self._heap[0][0] <= value:
            at, number = heapq.heappop(self._heap)
            if self._newest.get(number) == at:
                del self._newest[number]
                yield number


def _waits(samples: Seq[Sequence]) -> bool:
    """Whether a request has not begun: all of its samples wait, and none was ever admitted."""
    return all(each.phase is Phase.WAITING and each.times.admitted_s is None for each in samples)
