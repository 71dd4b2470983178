"""The choice of the cell type that runs next (thesis, Algorithm 1, lines 5 to 10)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from jaxserve.cells.policy import CellType


class TypeQueue(Protocol):
    """The ready nodes of a type.

    Attributes:
      num_running: submitted tasks of the type that are not completed.
    """

    @property
    def type(self) -> CellType: ...

    @property
    def num_running(self) -> int: ...

    def num_for(self, worker: int) -> int:
        """Return the number of nodes that a worker may run now."""
        ...


_Queue = TypeVar("_Queue", bound=TypeQueue)


def choose(queues: Iterable[_Queue], worker: int) -> _Queue | None:
    """Return the queue of the type that runs next; None without ready nodes.

    Args:
      queues: highest priority first.
    """
    idle = some = None
    for queue in queues:
        num_ready = queue.num_for(worker)
        if num_ready >= queue.type.max_batch:
            return queue
        if num_ready:
            if idle is None and queue.num_running == 0:
                idle = queue
            if some is None:
                some = queue
    return idle or some
