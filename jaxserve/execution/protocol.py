"""The protocols of the executors, which carry out the engine's plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.memory.page_pool import Moves
from jaxserve.scheduling.kv.swap_space import SwapCosts
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
    """An executor carries out plans in order: on a device, on a mesh, or in a simulation.

    `submit` returns at once. A plan may be submitted before the previous one is collected.
    `swap_costs`, `refinement`, `host_memory` and `num_device_groups` declare which optional
    features it has. Each of several device groups carries out its own plans in order.
    """

    @property
    def config(self) -> EngineConfig:
        """The present sizes of the executables and of the page pool."""
        ...

    @property
    def swap_costs(self) -> SwapCosts | None:
        """Seconds that page copies and recomputation take; None before they are measured."""
        ...

    @property
    def refinement(self) -> Refinement | None:
        """The update rule for the probe's readings (`StepResult.remaining`); None for no probe."""
        ...

    @property
    def num_device_groups(self) -> int:
        """Number of device groups with separate parameters and pages (`StepPlan.group`)."""
        ...

    @property
    def host_memory(self) -> HostMemory | None:
        """Access to the host pages, for a disk tier; None if there are no host pages."""
        ...

    def submit(self, plan: StepPlan) -> StepHandle: ...

    def use_idle_time(self) -> bool:
        """Do a piece of deferred work on the idle device; return whether there was one.

        The caller has collected every step, and calls again while it stays idle.
        """
        ...

    def resize(self, num_pages: int, moves: Moves) -> None:
        """Change the number of pages of the pool and of `config`.

        The caller has collected every step before the call, and submits none during it.

        Args:
          moves: (from, to) of pages whose contents move; the slots' page tables follow them. Other
            pages with an id below the old and the new number keep their contents. The contents of
            the rest are dropped.

        Raises:
          DeviceMemoryError: the memory is not enough; nothing has changed.
          InvalidConfigError: `ModelExecutor.can_resize` is false.
        """
        ...

    def reset(self) -> bool:
        """Recover from a failed step, with inert slots and arbitrary contents of pages.

        The caller has dropped every submitted step. Return False if the executor cannot recover.
        """
        ...

    def close(self) -> None:
        """Free all device memory. Nothing can be submitted afterwards."""
        ...


class GroupRole(Protocol):
    """The role of this process in a group of processes that serve one model together.

    Process 0 leads: it schedules. The rest follow: they carry out the leader's plans.
    """

    @property
    def is_leader(self) -> bool: ...

    def check_leads(self) -> None:
        """Raise ProcessGroupError if this process follows."""
        ...

    def follow(self) -> None:
        """Carry out the leader's plans until it dismisses the followers or closes.

        During the call only the leader reacts to Ctrl-C.

        Raises:
          ProcessGroupError: this process leads.
          RuntimeClosedError: the leader has already closed.
        """
        ...

    def dismiss(self) -> None:
        """End `follow` on the other processes; the next plan waits until they follow again.

        Raises:
          ProcessGroupError: this process follows.
        """
        ...


class ModelExecutor(Executor, Protocol):
    """An executor with a model's parameters and executables, as a `Runtime` needs it."""

    @property
    def group(self) -> GroupRole | None:
        """The role of this process; None if this process alone serves the model."""
        ...

    @property
    def can_resize(self) -> bool:
        """Whether `resize` is supported."""
        ...

    @property
    def num_compilations(self) -> int:
        """Number of executables that `submit` compiled or read from the persistent cache."""
        ...

    def warmup_steps(self) -> list[tuple[str, Callable[[], None]]]:
        """Return (name, function) of every executable; calling a function compiles it.

        The functions advance no slot and write to the null page only. Call `finish_warmup` last.
        """
        ...

    @property
    def prepares_in_parallel(self) -> bool:
        """Whether several threads may call the functions of `warmup_steps` except the last."""
        ...

    def warm_up_behind(self) -> bool:
        """Start to compile every executable on other threads, and return at once.

        A step that needs a missing executable compiles it, or waits for it. Return False if the
        executor cannot; then nothing is started, and `warmup_steps` must be called.
        """
        ...

    def is_ready(self) -> bool:
        """Return whether a first request waits for no executable of `warm_up_behind`.

        Executables for a single request, greedy or drawn, exist then. The first call ends the
        pause after which they are made if an earlier start has left them. True without a warm-up.
        """
        ...

    def finish_warmup(self) -> None:
        """Treat every later compilation as a stall, and in strict mode as an error."""
        ...

    @property
    def is_warm(self) -> bool:
        """Whether every executable is compiled for a pool of the present size."""
        ...

    @property
    def num_buffers(self) -> int:
        """Size of the whole page cache, in units of its largest buffer."""
        ...

    @property
    def device(self) -> Any:
        """The jax.Device of this process whose memory limits the page cache."""
        ...

    def encode(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the encoder's output for each prompt, float32 [tokens, embed], now.

        Only for a model with an encoder; prompts have at most `max_step_tokens` tokens together.

        Raises:
          ProcessGroupError: several processes serve the model.
          RuntimeClosedError: the executor was closed.
        """
        ...

    def fitted(self, params: Any, *, partial: bool = False) -> Any:
        """Return the whole model's `params` on the executor's devices, as `update_params` needs.

        Floating dtypes become those of the present parameters.

        Args:
          partial: whether parameters that `params` lacks stay as they are.

        Raises:
          InvalidParamsError: structure, shapes or dtypes differ from those of the present
            parameters.
          RuntimeClosedError: the executor was closed.
        """
        ...

    @property
    def params(self) -> Any:
        """The parameters that the next step computes with, as `update_params` takes them."""
        ...

    def update_params(self, params: Any) -> None:
        """Replace the parameters for all later steps by `params`, which `fitted` returned."""
        ...

    def drop_params(self) -> None:
        """Drop the references to the parameters; no step follows before the next update."""
        ...
