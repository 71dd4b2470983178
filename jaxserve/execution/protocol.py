"""The protocols between the engine and the executors that carry out its plans."""

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
        """Return whether `collect` would return without waiting."""
        ...

    def collect(self) -> StepResult:
        """Wait for the step and return its results. Call it once."""
        ...


class Executor(Protocol):
    """Carries out plans in the order of submission: on a device, on a mesh, or in a simulation.

    `submit` returns at once. A plan may be submitted before the one before it is collected.
    What an executor can do beyond that, it declares: `swap_costs`, `refinement`, `host_memory`,
    `num_device_groups`. With several device groups, each carries out its plans in their order.
    """

    @property
    def config(self) -> EngineConfig:
        """Sizes of the executables and of the page pool, as of now."""
        ...

    @property
    def swap_costs(self) -> SwapCosts | None:
        """Seconds that page copies and recomputation take; None before they are measured."""
        ...

    @property
    def refinement(self) -> Refinement | None:
        """How much the probe's readings (`StepResult.remaining`) say; None without a probe."""
        ...

    @property
    def num_device_groups(self) -> int:
        """Groups of devices with parameters and pages of their own, see `StepPlan.group`."""
        ...

    @property
    def host_memory(self) -> HostMemory | None:
        """Access to the pages on the host, for a disk tier; None without such pages."""
        ...

    def submit(self, plan: StepPlan) -> StepHandle: ...

    def resize(self, num_pages: int, moves: Moves) -> None:
        """Continue with another number of pages, which `config` has from then on.

        The caller has collected every step before, and submits none meanwhile.

        Args:
          moves: (from, to), pages whose contents move; the slots' page tables follow them. All
            other pages below both ends stay. The contents of the rest are dropped.

        Raises:
          DeviceMemoryError: not enough memory; nothing has changed.
          InvalidConfigError: the executor cannot resize its pool; see `ModelExecutor.can_resize`.
        """
        ...

    def close(self) -> None:
        """Free all device memory. Nothing can be submitted afterwards."""
        ...


class GroupRole(Protocol):
    """The part of this process in a group of processes that serve one model together.

    Process 0 leads: it schedules. The others follow: they carry out the leader's plans.
    """

    @property
    def is_leader(self) -> bool: ...

    def check_leads(self) -> None:
        """Raise ProcessGroupError where this process follows."""
        ...

    def follow(self) -> None:
        """Carry out the leader's plans until it dismisses the followers or closes.

        Ctrl-C is left to the leader meanwhile.

        Raises:
          ProcessGroupError: this process leads.
          RuntimeClosedError: the leader has closed before.
        """
        ...

    def dismiss(self) -> None:
        """Let `follow` return on the other processes; the next plan waits until they follow again.

        Raises:
          ProcessGroupError: this process follows.
        """
        ...


class ModelExecutor(Executor, Protocol):
    """An executor with a model's parameters and executables: what a `Runtime` needs."""

    @property
    def group(self) -> GroupRole | None:
        """The role of this process; None where this process alone serves the model."""
        ...

    @property
    def can_resize(self) -> bool:
        """Whether `resize` is supported."""
        ...

    @property
    def num_compilations(self) -> int:
        """Executables that `submit` compiled, or read from the persistent cache."""
        ...

    def warmup_steps(self) -> list[tuple[str, Callable[[], None]]]:
        """Return (name, function) of every executable; calling a function compiles it.

        The functions advance no slot and write to the null page only. Call `finish_warmup` last.
        """
        ...

    def finish_warmup(self) -> None:
        """Treat every compilation from here on as a stall, and in strict mode as an error."""
        ...

    @property
    def is_warm(self) -> bool:
        """Whether everything is compiled for a pool of the present size."""
        ...

    @property
    def num_buffers(self) -> int:
        """Size of the whole page cache, in units of its largest buffer."""
        ...

    @property
    def device(self) -> Any:
        """The jax.Device of this process whose memory limits the page cache."""
        ...

    def fitted(self, params: Any) -> Any:
        """Return the whole model's `params` as `update_params` takes them: on the same devices.

        Raises:
          InvalidConfigError: structure, shapes or dtypes differ from those of the present ones.
          RuntimeClosedError: the executor was closed.
        """
        ...

    def update_params(self, params: Any) -> None:
        """Compute from here on with other parameters, which `fitted` returned."""
        ...
