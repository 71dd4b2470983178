"""Requests with a latency bound that wait for room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import final

from jaxserve.core.errors import BoundNotMetError
from jaxserve.scheduling.lengths.bounds import too_late
from jaxserve.scheduling.pace import Pace
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Phase, Sequence


@final
class Deferred:
    """The requests with a latency bound that were accepted and have not begun."""

    def __init__(self) -> None:
        self._samples: list[Seq[Sequence]] = []

    def add(self, samples: Seq[Sequence]) -> None:
        """Take the samples of a request that was submitted."""
        self._samples.append(samples)

    def late(
        self, scheduler: Scheduler, pace: Callable[[], Pace | None], now_s: float
    ) -> Iterator[tuple[Sequence, BoundNotMetError]]:
        """Yield each sequence that would miss its bound if it began now, with its error.

        Where nothing runs, the pace may be that of long ago; only a bound that has passed counts.
        """
        self._samples = [samples for samples in self._samples if _waits(samples)]
        newest = pace() if self._samples else None
        for samples in self._samples if newest is not None else ():
            known = newest if scheduler.running else None
            error = too_late(samples, scheduler.lengths, scheduler.config, known, now_s)
            for sequence in samples if error is not None else ():
                assert error is not None
                yield sequence, error


def _waits(samples: Seq[Sequence]) -> bool:
    """Whether a request has not begun: all of its samples wait, and none was ever admitted."""
    return all(each.phase is Phase.WAITING and each.times.admitted_s is None for each in samples)
