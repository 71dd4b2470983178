"""Records of tasks and requests, for a report."""

from __future__ import annotations

from collections import deque
from typing import final

from jaxserve.cells.layout import Layout
from jaxserve.cells.policy import Task
from jaxserve.cells.results import CellCompletion
from jaxserve.core.config import bucket
from jaxserve.engine.recorder import Records, RequestRecord, StepRecord


@final
class CellRecorder:
    """The records of a cell engine: a task is a step, and a node is a token.

    The engine's thread writes it, and any thread may read `records`.
    """

    def __init__(self, layout: Layout, num_workers: int):
        self.records = Records()
        self._layout = layout
        # Of each worker: index, padding, requests and time of its tasks in flight.
        self._in_flight: list[deque[tuple[int, int, int, float]]] = [
            deque() for _ in range(num_workers)
        ]
        self._num_tasks = 0

    def submitted(self, task: Task, now_s: float, num_requests: int) -> int:
        """Record that a task was submitted, and return how many of its rows have no node.

        Args:
          num_requests: requests that have not ended.
        """
        cell = self._layout.types[task.type].cell
        num = len(task.nodes)
        padding = bucket(num + task.num_padding, cell.batch_sizes) - num
        self._in_flight[task.worker].append((self._num_tasks, padding, num_requests, now_s))
        self._num_tasks += 1
        return padding

    def collected(self, task: Task, now_s: float) -> None:
        """Record that the oldest task of a worker was collected."""
        index, padding, num_requests, submitted_s = self._in_flight[task.worker].popleft()
        num = len(task.nodes)
        self.records.add_step(
            StepRecord(
                index=index,
                kind=self._layout.types[task.type].cell.name,
                num_rows=num,
                num_tokens=num,
                num_iterations=1,
                num_padding_tokens=padding,
                num_running=num_requests,
                num_waiting=0,
                pages_owned=0,
                pages_reserved=0,
                pages_cached=0,
                pages_out=0,
                pages_in=0,
                submitted_s=submitted_s,
                host_gap_s=0.0,
                collected_s=now_s,
                group=task.worker,
            )
        )

    def request_ended(self, completion: CellCompletion) -> None:
        self.records.add_request(
            RequestRecord(
                request_id=completion.request_id,
                num_prompt_tokens=0,
                num_output_tokens=completion.num_nodes,
                finish_reason=completion.finish_reason,
                timing=completion.timing,
            )
        )
