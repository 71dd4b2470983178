"""What leading and following executors have in common: one device executor, told by a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.core.errors import InvalidConfigError
from jaxserve.execution.device import DeviceExecutor
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.memory.relocation import Moves
from sharding import ProcessGroup


class GroupExecutor:
    """This process's part of a model that lies on several processes; see `ModelExecutor`.

    All processes call the same executables in the same order; each starts its own devices, and
    results lie on all of them.
    """

    def __init__(self, executor: DeviceExecutor, group: ProcessGroup):
        self.config = executor.config
        self.swap_costs = executor.swap_costs
        self.host_memory: HostMemory | None = None  # each process has a part of a page alone
        self.refinement = executor.refinement
        self._executor = executor
        self._group = group
        self._num_updates = 0

    @property
    def num_compilations(self) -> int:
        """See `ModelExecutor`."""
        return self._executor.num_compilations

    @property
    def is_warm(self) -> bool:
        """See `ModelExecutor`."""
        return self._executor.is_warm

    @property
    def num_buffers(self) -> int:
        """See `ModelExecutor`."""
        return self._executor.num_buffers

    @property
    def device(self) -> Any:
        """See `ModelExecutor`."""
        return self._executor.device

    def warmup_steps(self) -> list[tuple[str, Callable[[], None]]]:
        """See `ModelExecutor`; all processes call them, in this order."""
        return self._executor.warmup_steps()

    def finish_warmup(self) -> None:
        """See `ModelExecutor`."""
        self._executor.finish_warmup()

    def fitted(self, params: Any) -> Any:
        """See `ModelExecutor`."""
        return self._executor.fitted(params)

    def resize(self, num_pages: int, moves: Moves) -> None:
        """Refused: the processes would have to agree on it."""
        raise InvalidConfigError(
            "the page pool of several processes cannot be resized; close the runtime on all of "
            "them, and make one with another kv_memory"
        )
