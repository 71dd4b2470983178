"""What the engine asks of whatever carries out its plans."""

from __future__ import annotations

from typing import Protocol

from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.plan import StepPlan, StepResult


class StepHandle(Protocol):
    """A submitted step."""

    def is_ready(self) -> bool:
        """Whether `collect` would return without waiting."""
        ...

    def collect(self) -> StepResult:
        """Wait for the step and return what it delivered; call once."""
        ...


class Executor(Protocol):
    """Carries out plans in the order of submission: a device, a mesh, or a simulation.

    `submit` returns at once; a plan may be submitted before the one before it was collected.
    """

    config: EngineConfig

    def submit(self, plan: StepPlan) -> StepHandle: ...

    def close(self) -> None:
        """Give back all device memory; nothing can be submitted afterwards."""
        ...
