"""When a request that has just arrived is expected to begin and to end."""

from __future__ import annotations

import bisect
from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, final

from jaxserve.scheduling.lengths.outlook import Outlook, expected_iterations, expected_queue
from jaxserve.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from jaxserve.scheduling.scheduler import Scheduler

# A simulation of the queue is used until one change for so many of its sequences has come.
_SEQUENCES_A_CHANGE = 256


@final
class ArrivalOutlook:
    """Simulates the queue for requests that arrive, at a bounded cost for each.

    With less than `_SEQUENCES_A_CHANGE` waiting sequences each request has a simulation of its
    own. In a longer queue one serves several arrivals and steps: a request begins when the first
    sequence behind it was to begin, and those that came since do not count, which are at most one
    in `_SEQUENCES_A_CHANGE`.
    """

    def __init__(self) -> None:
        self._num_changes = 0
        # Of the newest simulation: the sequences that wait, by their place in the policy's order,
        # when they begin in iterations, and the running ones that were taken as gone.
        self._places: list[Any] = []
        self._begins: list[float] = []
        self._without: Collection[Sequence] = ()

    def step(self) -> None:
        """Note that another step is being planned."""
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
        """Return the outlook of a request that was just added.

        Args:
          samples: its sequences, all of which wait.
          without: see `outlooks`.
          at_once: it begins now, whatever waits.
        """
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
        """Return the index of the first sequence at a place or behind it, or of the last one."""
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
