"""Carries out plans on a mesh over several processes, seen from the one that schedules."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.execution.group import GroupExecutor
from jaxserve.execution.handle import DeviceHandle
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
class LeadingExecutor(GroupExecutor):
    """Sends every plan to the followers before it is carried out here. Warm up before."""

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
