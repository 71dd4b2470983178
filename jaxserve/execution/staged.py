"""The executor that carries out plans on the stages of a stage plan, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import jax
import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import RuntimeClosedError
from jaxserve.execution.compilations import CompilationCounter
from jaxserve.execution.device_stage import DeviceStage
from jaxserve.execution.encoding import encode_prompts
from jaxserve.execution.handle import DeviceHandle
from jaxserve.execution.micro_batches import Pass
from jaxserve.execution.page_calls import PAGES_A_CALL, num_incoming
from jaxserve.execution.page_copies import DevicePages
from jaxserve.execution.protocol import GroupRole
from jaxserve.execution.staged_host import StagedHostMemory
from jaxserve.execution.staged_loops import run_loop
from jaxserve.execution.staged_steps import StagedSteps
from jaxserve.execution.staged_warmup import StagedWarmup
from jaxserve.execution.swap_costs import (
    KeptSwapCosts,
    SwapCostMeter,
    measured_costs,
    work_of_a_position,
)
from jaxserve.execution.weights import check_same, fitted
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.memory.page_pool import NULL_PAGE
from jaxserve.memory.relocation import Moves
from jaxserve.models.batch import KVCache
from jaxserve.models.parts import ModelPart
from jaxserve.scheduling.kv.swap_space import SwapCosts
from jaxserve.scheduling.plan import PageCopies, StepPlan
from jaxserve.steps.packing import pack_rows
from predictor import Refinement


@final
class StagedExecutor:
    """An `Executor` over several stages, which compute different micro-batches at the same time.

    The host submits all work in the order in which the devices run it, and does not wait: the
    arrays that pass from stage to stage keep the order. A decode loop runs all of its iterations,
    since only the devices know which sequences have ended.

    Args:
      config: the stages' configuration, with the number of host pages that each of them has.
      parts: the parts of the model from which the stages were made, one per stage.
      whole: structure, shapes and dtypes of the whole model's parameters.
      embed: width of the hidden states that pass from stage to stage.
      micro_batches: maximum number of micro-batches of a step; a power of two.
      strict: raise on any compilation after the warm-up.
      takes_masks: warm up what requests with a grammar need.
    """

    def __init__(
        self,
        config: EngineConfig,
        stages: Sequence[DeviceStage],
        parts: Sequence[ModelPart],
        whole: Any,
        embed: int,
        micro_batches: int,
        *,
        strict: bool = False,
        takes_masks: bool = False,
    ):
        self.config = config
        self.refinement: Refinement | None = None
        self.group: GroupRole | None = None
        self.num_device_groups = 1
        self.can_resize = True
        self.prepares_in_parallel = False  # its warm-up runs steps
        self._stages = list(stages)
        self._steps = StagedSteps(self._stages, micro_batches, self._tell)
        self._host_memory = StagedHostMemory(self._stages) if config.num_host_pages else None
        caches = [stage.pages.cache for stage in stages]
        self._swap_costs = SwapCostMeter(
            KeptSwapCosts(stages[0].programs.shelf, config, caches, micro_batches),
            self._swap_timings,
            has_host_pages=config.num_host_pages > 0,
        )
        self._parts = list(parts)
        self._whole = whole
        self._embed = embed
        self._micro_batches = micro_batches
        self._takes_masks = takes_masks
        self._compilations = CompilationCounter(strict=strict)
        # Cache sizes for which every executable is compiled.
        self._warm_num_pages: set[int] = set()
        self._on_pass: Callable[[Pass], None] | None = None

    @property
    def swap_costs(self) -> SwapCosts | None:
        """See `Executor`."""
        return self._swap_costs.costs

    @property
    def host_memory(self) -> HostMemory | None:
        """See `Executor`."""
        return self._host_memory

    @property
    def num_compilations(self) -> int:
        """See `ModelExecutor`."""
        return self._compilations.count

    def watch(self, on_pass: Callable[[Pass], None]) -> None:
        """Call `on_pass` with every later pass, for measurements of the pipeline."""
        self._on_pass = on_pass

    def submit(self, plan: StepPlan) -> DeviceHandle:
        """See `Executor`."""
        self._raise_if_closed()
        with self._compilations.watch(plan):
            count = num_incoming(self.config, plan)
            self._swap(plan.swaps_out, plan.swaps_in[count:])
            for stage in self._stages:
                stage.edit(plan)
            needs = self._stages[-1].slots.needs(plan.rows)
            if plan.is_decode_loop:
                return run_loop(self._stages, plan, needs, self._micro_batches, self._tell)
            return self._steps.mixed(plan, needs, plan.swaps_in[:count])

    def encode(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """See `ModelExecutor`."""
        self._raise_if_closed()
        return encode_prompts(self._stages[0].programs, self._stages[0].params, prompts)

    def fitted(self, params: Any, *, partial: bool = False) -> list[Any]:
        """See `ModelExecutor`. The result has one entry per stage."""
        self._raise_if_closed()
        check_same(params, self._whole, partial=partial)
        return [
            fitted(part.params_of(params), stage.params, partial=partial)
            for part, stage in zip(self._parts, self._stages, strict=True)
        ]

    @property
    def params(self) -> list[Any]:
        """See `ModelExecutor`."""
        return [stage.params for stage in self._stages]

    def update_params(self, params: list[Any]) -> None:
        """See `ModelExecutor`."""
        for stage, own in zip(self._stages, params, strict=True):
            stage.update_params(own)

    def drop_params(self) -> None:
        """See `ModelExecutor`."""
        for stage in self._stages:
            stage.drop_params()

    @property
    def stages(self) -> tuple[DeviceStage, ...]:
        """The stages in order; empty after `close`."""
        return tuple(self._stages)

    @property
    def page_pools(self) -> tuple[DevicePages, ...]:
        """See `LinkedExecutor`."""
        return tuple(stage.pages for stage in self._stages)

    def compiled_steps(self) -> list[list[Any]]:
        """Return the executables of each stage's largest mixed step and decode iteration."""
        self._raise_if_closed()
        return [
            stage.programs.compiled_stage_steps(
                *(stage.params, stage.pages.cache, self._embed if i else None),
                samples=stage is self._stages[-1],
            )
            for i, stage in enumerate(self._stages)
        ]

    def resize(self, num_pages: int, moves: Moves) -> None:
        """See `Executor`."""
        self._raise_if_closed()
        self._swap_costs.restart()
        old_num_pages = self.config.num_pages
        done: list[DeviceStage] = []
        try:
            for stage in self._stages:
                stage.resize(num_pages, moves)
                done.append(stage)
        except Exception:
            for stage in done:
                stage.resize(old_num_pages, [(new, old) for old, new in moves])
            raise
        self.config = replace(self.config, num_pages=num_pages)
        self._compilations.expect_none(num_pages in self._warm_num_pages)

    @property
    def num_buffers(self) -> int:
        """See `ModelExecutor`; the minimum over the stages."""
        return min(stage.pages.num_buffers for stage in self._stages)

    @property
    def device(self) -> Any:
        """See `ModelExecutor`; a device of the stage whose pages are the largest."""
        largest = max(self._stages, key=lambda stage: stage.pages.shard_bytes)
        return next(iter(largest.programs.place.whole.device_set))

    def reset(self) -> bool:
        """See `Executor`."""
        for stage in self._stages:
            stage.renew()
        return True

    def close(self) -> None:
        """See `Executor`."""
        if self._stages:
            for stage in self._stages:
                stage.delete()
            self._compilations.close()
        self._stages.clear()

    def _tell(self, new: Pass) -> None:
        if self._on_pass is not None:
            self._on_pass(new)

    def _raise_if_closed(self) -> None:
        if not self._stages:
            raise RuntimeClosedError("the executor was closed; create a new runtime")

    # ---- warm-up ----

    def warmup_steps(self) -> list[tuple[str, Callable[[], Any]]]:
        """See `ModelExecutor`."""
        parts = (self.config, self._stages, self._steps, self._micro_batches)
        steps = StagedWarmup(*parts, takes_masks=self._takes_masks).steps()
        if self._swap_costs.is_missing:
            steps.append(("page swaps", self._swap_costs.measure))
        return steps

    def use_idle_time(self) -> bool:
        """See `Executor`. It times page swaps once more."""
        if not (self._swap_costs.is_missing and self.is_warm):
            return False
        self._swap_costs.measure_on()
        return True

    def warm_up_behind(self) -> bool:
        """See `ModelExecutor`."""
        return False

    def is_ready(self) -> bool:
        """Return True, since nothing is made behind requests."""
        return True

    def finish_warmup(self) -> None:
        """See `ModelExecutor`."""
        for stage in self._stages:
            jax.block_until_ready((stage.pages.cache, stage.slots.state))
        self._warm_num_pages.add(self.config.num_pages)
        self._compilations.expect_none()

    @property
    def is_warm(self) -> bool:
        """See `ModelExecutor`."""
        return self._compilations.is_warm

    def _swap(self, out: PageCopies, back: PageCopies) -> None:
        """Copy pages to the host, then from it; the stages' copies in one direction overlap."""
        for stage in self._stages:
            stage.swap(out, ())
        for stage in self._stages:
            stage.swap((), back)

    def _swap_timings(self) -> Iterator[SwapCosts | None]:
        """Time copies and prefill on all stages together, so that what overlaps counts once."""
        unused_page = self.config.num_host_pages
        out, back = ((NULL_PAGE, unused_page),), ((unused_page, NULL_PAGE),)
        batch, _ = pack_rows(self.config, (), self.config.token_buckets[-1])

        def caches() -> list[KVCache]:
            return [stage.pages.cache for stage in self._stages]

        def swap() -> None:
            self._swap(out * PAGES_A_CALL, back * PAGES_A_CALL)
            jax.block_until_ready(caches())

        def prefill() -> None:
            for _ in range(self._micro_batches):
                if self.config.has_encoder:
                    self._steps.encode(batch)
                else:
                    self._steps.pass_through(batch)
            jax.block_until_ready(caches())

        return measured_costs(
            *(swap, prefill),
            num_pages=PAGES_A_CALL,
            num_tokens=self._micro_batches * len(batch.token_row),
            position_work=work_of_a_position(
                [stage.programs.model_config for stage in self._stages], self._whole
            ),
        )
