"""Counters of a cell engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass
class CellStats:
    """Counters since the start.

    Attributes:
      num_tasks, num_calls: tasks, and calls of executables that ran them; a call runs several
        tasks of one type and size.
      num_nodes: nodes in tasks; a loop's node counts in each of its steps.
      num_padding: rows of tasks without a node.
      scheduling_s: seconds that the policy took.
      submitting_s: seconds that the executor took to submit tasks.
    """

    num_tasks: int = 0
    num_calls: int = 0
    num_nodes: int = 0
    num_padding: int = 0
    scheduling_s: float = 0.0
    submitting_s: float = 0.0

    def submitted(self, num_calls: int, scheduling_s: float, submitting_s: float) -> None:
        """Count tasks that were submitted together."""
        self.num_calls += num_calls
        self.scheduling_s += scheduling_s
        self.submitting_s += submitting_s

    def added(self, num_tasks: int, num_nodes: int, num_padding: int) -> None:
        """Count the tasks of a call."""
        self.num_tasks += num_tasks
        self.num_nodes += num_nodes
        self.num_padding += num_padding
