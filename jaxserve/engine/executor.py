"""What the engine asks of whatever carries out its plans."""

from __future__ import annotations

from typing import Protocol

from jaxserve.core.config import EngineConfig
from jaxserve.memory.relocation import Moves
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

    def resize(self, num_pages: int, moves: Moves) -> None:
        """Go on with another number of pages; `config` says so from then on.

        Every step was collected before, and none is submitted meanwhile.

        Args:
          moves: (from, to), pages whose contents go elsewhere; the slots' page tables follow them.
            All others below both ends stay. What is gone then is of no further use.

        Raises:
          DeviceMemoryError: not enough memory; nothing has changed.
        """
        ...

    def close(self) -> None:
        """Give back all device memory; nothing can be submitted afterwards."""
        ...
