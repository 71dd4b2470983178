"""What the engine asks of whatever carries out its plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from jaxserve.core.config import EngineConfig
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.memory.relocation import Moves
from jaxserve.scheduling.kv.costs import SwapCosts
from jaxserve.scheduling.plan import StepPlan, StepResult
from predictor import Refinement


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
    swap_costs: SwapCosts | None
    """Of bringing pages to the host and back, beside computing them anew; None if not measured."""

    refinement: Refinement | None
    """What the readings of its probe are worth (`StepResult.remaining`); None without a probe."""

    @property
    def host_memory(self) -> HostMemory | None:
        """The contents of the host's pages, for a disk; None where they cannot be read."""
        ...

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


class ModelExecutor(Executor, Protocol):
    """An executor with a model's parameters and executables: what a `Runtime` needs."""

    @property
    def num_compilations(self) -> int:
        """Executables compiled (or read from the persistent cache) by `submit`."""
        ...

    def warmup_steps(self) -> list[tuple[str, Callable[[], None]]]:
        """(name, function) of every executable; running a function compiles it, harmlessly.

        No slot advances, and nothing but the null page is written. Call `finish_warmup` last.
        """
        ...

    def finish_warmup(self) -> None:
        """From here on a compilation is a stall (and in strict mode an error)."""
        ...

    @property
    def is_warm(self) -> bool:
        """Whether everything was compiled for a cache of this size."""
        ...

    @property
    def num_buffers(self) -> int:
        """How often the largest buffer of the cache goes into all of it."""
        ...

    @property
    def device(self) -> Any:
        """The one whose memory limits the cache, of this process."""
        ...

    def fitted(self, params: Any) -> Any:
        """The whole model's `params` as `update_params` takes them: where the present ones are.

        Raises:
          InvalidConfigError: they differ in structure, shape or dtype.
          RuntimeClosedError: the executor was closed.
        """
        ...

    def update_params(self, params: Any) -> None:
        """Compute from here on with other parameters, as `fitted` gives them."""
        ...
