"""Carries out plans on a mesh over several processes, seen from the one that schedules."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.engine.device_executor import DeviceExecutor
from jaxserve.engine.device_handle import DeviceHandle
from jaxserve.memory.relocation import Moves
from jaxserve.scheduling.plan import StepPlan
from sharding import ProcessGroup


@final
class Order(enum.Enum):
    """What a leader sends beside plans: return to your script, or close."""

    DISMISS = enum.auto()
    CLOSE = enum.auto()


@final
@dataclass(frozen=True)
class ParamsUpdated:
    """The parameters were replaced for the `count`-th time; a follower has done so too."""

    count: int


@final
class LeadingExecutor:
    """A `DeviceExecutor` whose every plan goes to the followers before it is carried out here.

    All processes call the same executables in the same order; each starts its own devices, and
    results lie on all of them. Warm up before.
    """

    def __init__(self, executor: DeviceExecutor, group: ProcessGroup):
        self.config = executor.config
        self._executor = executor
        self._group = group
        self._num_updates = 0

    @property
    def num_compilations(self) -> int:
        """See `ModelExecutor`."""
        return self._executor.num_compilations

    def fitted(self, params: Any) -> Any:
        """See `ModelExecutor`."""
        return self._executor.fitted(params)

    def warmup_steps(self) -> list[tuple[str, Callable[[], None]]]:
        """See `ModelExecutor`; all processes call them, in this order."""
        return self._executor.warmup_steps()

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

    def resize(self, num_pages: int, moves: Moves) -> None:
        """Refused: the processes would have to agree on it."""
        raise InvalidConfigError(
            "the page pool of several processes cannot be resized; close the runtime on all of "
            "them, and make one with another kv_memory"
        )

    def finish_warmup(self) -> None:
        """See `ModelExecutor`."""
        self._executor.finish_warmup()

    def submit(self, plan: StepPlan) -> DeviceHandle:
        self._group.broadcast(plan)
        return self._executor.submit(plan)

    def update_params(self, params: Any) -> None:
        """See `ModelExecutor`; the followers must have done the same by the next plan."""
        self._executor.update_params(params)
        self._num_updates += 1
        self._group.broadcast(ParamsUpdated(self._num_updates))

    def dismiss(self) -> None:
        """Let `FollowingExecutor.follow` return; the next plan waits until it is called again."""
        self._group.broadcast(Order.DISMISS)

    def close(self) -> None:
        """Close it on all processes."""
        self._group.broadcast(Order.CLOSE)
        self._executor.close()
        self._group.release()


def check_alike(group: ProcessGroup, settings: dict[str, Any]) -> None:
    """Compare what must be the same on all processes; they all call it.

    Raises:
      InvalidConfigError: naming what differs, on all processes.
    """
    everyones = group.all_gather(settings)
    for process_id, theirs in enumerate(everyones):
        for name, value in everyones[0].items():
            if theirs[name] != value:
                raise InvalidConfigError(
                    f"{name} is {value!r} on process 0 and {theirs[name]!r} on process "
                    f"{process_id}; give all processes the same model and options"
                )
