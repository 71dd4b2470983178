"""What carries out the engine's plans, on devices or in a simulation. It loads no JAX."""

from __future__ import annotations

import abc
from typing import Protocol

from jaxserve.core.config import EngineConfig
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.memory.page_pool import Moves
from jaxserve.predictor import Refinement
from jaxserve.scheduling.kv.manager import SwapCosts
from jaxserve.scheduling.plan import StepPlan, StepResult


class StepHandle(Protocol):
    """A submitted step."""

    def is_ready(self) -> bool:
        """Return whether `collect` would return without waiting."""
        ...

    def collect(self) -> StepResult:
        """Wait for the step and return its results. Call it once."""
        ...


class Executor(abc.ABC):
    """Carries out plans in order: on a device, on a mesh, or in a simulation.

    `submit` returns at once. A plan may be submitted before the previous one is collected. Each of
    several device groups carries out its own plans in order.

    Attributes:
      config: the present sizes of the executables and of the page pool.
      num_device_groups: number of device groups with separate parameters and pages
        (`StepPlan.group`).
      refinement: the update rule for the probe's readings (`StepResult.remaining`); None for no
        probe.
      group: the role of this process; None if this process alone serves the model.
      can_resize: whether `resize` is supported.
    """

    config: EngineConfig
    num_device_groups: int = 1
    refinement: Refinement | None = None
    group: ProcessRole | None = None
    can_resize: bool = True

    @property
    def swap_costs(self) -> SwapCosts | None:
        """Seconds that page copies and recomputation take; None before they are measured."""
        return None

    @property
    def host_memory(self) -> HostMemory | None:
        """Access to the host pages, for a disk tier; None if there are no host pages."""
        return None

    @property
    def host_states(self) -> HostMemory | None:
        """Access to the states on the host, likewise."""
        return None

    @property
    def has_lost_params(self) -> bool:
        """Whether an array of the parameters was deleted, as donated ones are."""
        return False

    @abc.abstractmethod
    def submit(self, plan: StepPlan) -> StepHandle: ...

    def use_idle_time(self) -> bool:
        """Do a piece of deferred work on the idle device; return whether there was one.

        The caller has collected every step, and calls again while it stays idle.
        """
        return False

    @abc.abstractmethod
    def resize(self, num_pages: int, moves: Moves) -> None:
        """Change the number of pages of the pool and of `config`.

        The caller has collected every step before the call, and submits none during it.

        Args:
          moves: (from, to) of pages whose contents move; the slots' page tables follow them. Other
            pages with an id below the old and the new number keep their contents. The contents of
            the rest are dropped.

        Raises:
          DeviceMemoryError: the memory is not enough; nothing has changed.
          InvalidConfigError: `can_resize` is false.
        """

    @abc.abstractmethod
    def reset(self) -> bool:
        """Recover from a failed step, with inert slots and arbitrary contents of pages.

        The caller has dropped every submitted step. Return False if the executor cannot recover.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Free all device memory. Nothing can be submitted afterwards."""


class ProcessRole(abc.ABC):
    """The role of this process among several that serve one model together.

    Process 0 leads: it schedules. The rest follow: they carry out the leader's plans.
    """

    @property
    @abc.abstractmethod
    def is_leader(self) -> bool: ...

    @abc.abstractmethod
    def check_leads(self) -> None:
        """Raise ProcessGroupError if this process follows."""

    @abc.abstractmethod
    def follow(self) -> None:
        """Carry out the leader's plans until it dismisses the followers or closes.

        During the call only the leader reacts to Ctrl-C.

        Raises:
          ProcessGroupError: this process leads.
          RuntimeClosedError: the leader has already closed.
        """

    @abc.abstractmethod
    def dismiss(self) -> None:
        """End `follow` on the other processes; the next plan waits until they follow again.

        Raises:
          ProcessGroupError: this process follows.
        """
