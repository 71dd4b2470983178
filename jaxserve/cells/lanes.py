"""The tasks in flight of all workers, and ids that they may still name."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import final

from jaxserve.cells.executor import CellHandle, NodeRows
from jaxserve.core.clock import Clock


@final
class _Lane:
    """The tasks of one worker that are submitted and not collected, in their order.

    Attributes:
      num_groups: groups of tasks that the policy returned together.
      num_submitted, num_collected: handles since the start.
    """

    def __init__(self) -> None:
        self.handles: deque[tuple[CellHandle, bool]] = deque()  # whether it ends its group
        self.num_groups = 0
        self.num_submitted = 0
        self.num_collected = 0

    def push(self, handle: CellHandle, *, ends_group: bool) -> None:
        self.handles.append((handle, ends_group))
        self.num_groups += ends_group
        self.num_submitted += 1

    def pop(self) -> CellHandle:
        handle, ends_group = self.handles.popleft()
        self.num_groups -= ends_group
        self.num_collected += 1
        return handle


@final
class Lanes:
    """The tasks in flight, and the ids of rows.

    Args:
      max_in_flight: groups of tasks that a worker is given ahead.
    """

    def __init__(self, num_workers: int, max_in_flight: int, clock: Clock):
        self._lanes = [_Lane() for _ in range(num_workers)]
        self._max_in_flight = max_in_flight
        self._clock = clock
        self._rows = NodeRows()
        # Ranges of ids that tasks in flight may name: (handles submitted before, first, number).
        self._limbo: deque[tuple[list[int], int, int]] = deque()

    @property
    def is_at_work(self) -> bool:
        return any(lane.handles for lane in self._lanes)

    @property
    def num_rows(self) -> int:
        """Ids of rows are below it."""
        return self._rows.num_rows

    def open_workers(self, among: Collection[int] | None = None) -> list[int]:
        """Return the workers that may be given another group of tasks, the least loaded first.

        Those come first that have the fewest groups, and of these the ones that have been given the
        fewest calls.

        Args:
          among: workers of which to choose; None for all.
        """
        found = [
            (lane.num_groups, lane.num_submitted, worker)
            for worker, lane in enumerate(self._lanes)
            if lane.num_groups < self._max_in_flight and (among is None or worker in among)
        ]
        return [worker for *_, worker in sorted(found)]

    def has_run(self, worker: int) -> bool:
        """Return whether a worker has run the tasks that it was given last."""
        handles = self._lanes[worker].handles
        return bool(handles) and handles[-1][0].is_ready()

    def has_news(self, worker: int) -> bool:
        """Return whether a request may wait for the results of what a worker was given last."""
        return self._lanes[worker].handles[-1][0].has_news

    @property
    def is_any_ready(self) -> bool:
        """Whether a worker has run its oldest tasks in flight."""
        oldest = [lane.handles[0][0] for lane in self._lanes if lane.handles]
        return any([handle.is_ready() for handle in oldest])

    def push(self, worker: int, handles: list[CellHandle]) -> None:
        """Add a group of tasks."""
        for handle in handles:
            self._lanes[worker].push(handle, ends_group=handle is handles[-1])

    def push_read(self, worker: int, handle: CellHandle) -> None:
        """Add a handle without tasks, which is not counted as a group."""
        self._lanes[worker].push(handle, ends_group=False)

    def pop_ready(self) -> tuple[int, CellHandle] | None:
        """Remove the oldest handle of a worker that is ready.

        If none is ready, wait; but only for a moment if there are several workers and one of them
        may be given more, so that a request that arrives does not wait for a task of another one.

        Returns:
          Its worker, and the handle; None if none is ready. With one worker, a handle that may not
          be ready, whose `collect` waits.
        """
        if len(self._lanes) == 1:
            return 0, self._lanes[0].pop()
        while (found := self._pop_if_ready()) is None:
            self._clock.wait()
            if self.open_workers():
                return self._pop_if_ready()
        return found

    def _pop_if_ready(self) -> tuple[int, CellHandle] | None:
        for worker, lane in enumerate(self._lanes):
            if lane.handles and lane.handles[0][0].is_ready():
                return worker, lane.pop()
        return None

    def clear(self) -> None:
        for lane in self._lanes:
            lane.handles.clear()

    def take_rows(self, num: int) -> int:
        """Return the first of consecutive ids that no task in flight names."""
        return self._rows.take(num)

    def free_rows(self, first: int, num: int) -> None:
        """Take back ids, which are used again when the tasks of now have been collected."""
        self._limbo.append(([lane.num_submitted for lane in self._lanes], first, num))

    def forget_rows(self) -> list[range]:
        """Return the ids that no task in flight names any more, each once."""
        found = []
        last: list[int] = []  # numbers of handles that have been collected
        while self._limbo:
            submitted, first, num = self._limbo[0]
            if submitted != last:
                pairs = zip(self._lanes, submitted, strict=True)
                if any([lane.num_collected < until for lane, until in pairs]):
                    break
                last = submitted
            self._limbo.popleft()
            self._rows.free(first, num)
            found.append(range(first, first + num))
        return found
