"""Records of tasks and requests, for a report."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, final

from jaxserve.cells.answers import CellCompletion
from jaxserve.cells.layout import CellLayout
from jaxserve.cells.policy import TaskGroup
from jaxserve.core.config import bucket
from jaxserve.engine.recorder import MAX_RECORDS, Records, RequestRecord, StepRecord


class _SubmittedTasks(NamedTuple):
    """Counts of tasks of one type that were submitted together; records are made when read."""

    index: int
    type: int
    worker: int
    num_nodes: Sequence[int]
    num_rows: Sequence[int]
    num_requests: int
    submitted_s: float


@final
class CellRecorder:
    """The records of a cell engine: a task is a step, and a node is a token.

    The engine's thread writes it, and any thread may read `records`.
    """

    def __init__(self, layout: CellLayout, num_workers: int):
        self._layout = layout
        self._records = Records()
        self._reading = threading.Lock()
        self._in_flight: list[deque[_SubmittedTasks]] = [deque() for _ in range(num_workers)]
        # Calls with the time of their collection, not yet converted by `records`.
        self._collected: deque[tuple[_SubmittedTasks, float]] = deque(maxlen=MAX_RECORDS)
        self._ended: deque[CellCompletion] = deque(maxlen=MAX_RECORDS)  # likewise
        self._num_tasks = 0
        # (type, number of rows) -> compiled size.
        self._sizes = [
            [bucket(num, t.cell.batch_sizes) for num in range(t.cell.batch_sizes[-1] + 1)]
            for t in layout.types
        ]

    @property
    def records(self) -> Records:
        with self._reading:
            while self._collected:
                for step in self._steps(*self._collected.popleft()):
                    self._records.add_step(step)
            while self._ended:
                self._records.add_request(_request(self._ended.popleft()))
        return self._records

    def submitted(self, tasks: TaskGroup, now_s: float, num_requests: int) -> int:
        """Record the submitted tasks of a call; return their rows without a node."""
        type, worker = tasks.type, tasks.worker
        call = _SubmittedTasks(
            self._num_tasks, type, worker, tasks.sizes, tasks.num_rows, num_requests, now_s
        )
        self._in_flight[worker].append(call)
        self._num_tasks += len(tasks)
        return sum(map(self._sizes[type].__getitem__, tasks.num_rows)) - len(tasks.array)

    def collected(self, worker: int, now_s: float) -> None:
        self._collected.append((self._in_flight[worker].popleft(), now_s))

    def request_ended(self, completion: CellCompletion) -> None:
        self._ended.append(completion)

    def _steps(self, call: _SubmittedTasks, collected_s: float) -> list[StepRecord]:
        sizes = self._sizes[call.type]
        return [
            StepRecord(
                index=call.index + number,
                kind=self._layout.types[call.type].cell.name,
                num_rows=num,
                num_tokens=num,
                num_iterations=1,
                num_padding_tokens=sizes[rows] - num,
                num_running=call.num_requests,
                num_waiting=0,
                pages_owned=0,
                pages_reserved=0,
                pages_cached=0,
                pages_out=0,
                pages_in=0,
                submitted_s=call.submitted_s,
                host_gap_s=0.0,
                collected_s=collected_s,
                group=call.worker,
            )
            for number, (num, rows) in enumerate(zip(call.num_nodes, call.num_rows, strict=True))
        ]


def _request(completion: CellCompletion) -> RequestRecord:
    return RequestRecord(
        request_id=completion.request_id,
        num_prompt_tokens=0,
        num_output_tokens=completion.num_nodes,
        finish_reason=completion.finish_reason,
        timing=completion.timing,
    )
