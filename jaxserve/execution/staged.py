"""The executor that carries out plans on the stages of a stage plan, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any, final

import jax
import numpy as np

from jaxserve.core.errors import RuntimeClosedError
from jaxserve.execution.compilations import CompilationCounter
from jaxserve.execution.device_stage import DeviceStage
from jaxserve.execution.encoding import encode_prompts
from jaxserve.execution.handle import DeviceHandle, PromptPart
from jaxserve.execution.micro_batches import Pass, micro_batches
from jaxserve.execution.page_copies import DevicePages
from jaxserve.execution.protocol import GroupRole
from jaxserve.execution.weights import check_same, fitted
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.memory.relocation import Moves
from jaxserve.models.parts import ModelPart
from jaxserve.scheduling.kv.costs import SwapCosts
from jaxserve.scheduling.plan import Row, StepPlan
from jaxserve.steps.outputs import Outputs
from jaxserve.steps.packing import (
    decode_window,
    no_masks,
    pack_masks,
    pack_rows,
    pack_window,
    sampling_first,
    sampling_slots,
)
from jaxserve.steps.sampling.variants import SamplingNeeds, Variant
from predictor import Refinement


@final
class StagedExecutor:
    """An `Executor` over several stages, which compute different micro-batches at the same time.

    The host submits all work in the order in which the devices run it, and does not wait: the
    arrays that pass from stage to stage keep the order. A decode loop runs all of its iterations,
    since only the devices know which sequences have ended.

    Args:
      parts: the parts of the model from which the stages were made, one per stage.
      whole: structure, shapes and dtypes of the whole model's parameters.
      embed: width of the hidden states that pass from stage to stage.
      micro_batches: maximum number of micro-batches of a step; a power of two.
      strict: raise on any compilation after the warm-up.
      takes_masks: warm up what requests with a grammar need.
    """

    def __init__(
        self,
        stages: Sequence[DeviceStage],
        parts: Sequence[ModelPart],
        whole: Any,
        embed: int,
        micro_batches: int,
        *,
        strict: bool = False,
        takes_masks: bool = False,
    ):
        self.config = stages[0].programs.config
        self.swap_costs: SwapCosts | None = None
        self.host_memory: HostMemory | None = None
        self.refinement: Refinement | None = None
        self.group: GroupRole | None = None
        self.num_device_groups = 1
        self.can_resize = True
        self.prepares_in_parallel = False  # its warm-up runs steps
        self._stages = list(stages)
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
            for stage in self._stages:
                stage.edit(plan)
            needs = self._stages[-1].slots.needs(plan.rows)
            return self._decode(plan, needs) if plan.is_decode_loop else self._mixed(plan, needs)

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
        """See `Executor`; stages cannot."""
        return False

    def close(self) -> None:
        """See `Executor`."""
        if self._stages:
            for stage in self._stages:
                stage.delete()
            self._compilations.close()
        self._stages = []

    # ---- steps ----

    def _mixed(self, plan: StepPlan, needs: SamplingNeeds) -> DeviceHandle:
        # If a row returns prompt log-probabilities, the step is one batch, so that their spans are
        # those of the step.
        wants_prompts = any(row.wants_prompt_logprobs for row in plan.rows)
        prompts = [row for row in plan.rows if row.encodes]
        marker: Any = self._encode(pack_rows(self.config, prompts)[0]) if prompts else None
        if prompts and len(prompts) == len(plan.rows):
            return DeviceHandle(plan, needs, marker, (), np.empty(0, np.int32))
        batches = [[(i, row) for i, row in enumerate(plan.rows) if not row.encodes]]
        if not wants_prompts:
            smallest = self.config.token_buckets[0]
            batches = list(micro_batches(batches[0], self._micro_batches, smallest))
        outputs: list[Outputs] = []
        output_rows = np.full(len(plan.rows), -1, np.int32)
        prompt_part = None
        num_outputs = 0
        for batch in batches:
            batch = [batch[i] for i in sampling_first([row for _, row in batch])]
            rows = [row for _, row in batch]
            packed, starts = pack_rows(self.config, rows)
            samples = any(row.samples for row in rows)
            self._tell((row.slot for row in rows), len(packed.token_row), samples)
            hidden = None
            for stage in self._stages:
                hidden, marker = stage.mixed(packed, hidden)
            if wants_prompts:
                prompt_part = self._prompt_part(batch, starts, packed, hidden)
            if samples:
                index = sampling_slots(self.config, rows, needs.variant)
                none = self._stages[-1].no_outputs(len(index), 1, needs.variant)
                sampling = [i for i, row in batch if row.samples]
                masks = pack_masks(plan, sampling, len(index))
                outputs.append(self._sample(marker, index, none, needs.variant, masks))
                output_rows[sampling] = num_outputs + np.arange(len(sampling))
                num_outputs += len(index)
        marker = outputs[-1].tokens if outputs else marker
        return DeviceHandle(plan, needs, marker, outputs, output_rows, prompt_part)

    def _encode(self, batch: Any) -> jax.Array:
        """Encode whole prompts on the first stage, and write what each stage's layers see."""
        encoded = self._stages[0].encode(batch)
        for stage in self._stages:
            stage.write_encoded(batch, encoded)
        return encoded

    def _decode(self, plan: StepPlan, needs: SamplingNeeds) -> DeviceHandle:
        whole, _ = decode_window(self.config, plan, needs.variant)
        size = self._micro_batch_size(len(whole))
        live = sorted({(row.slot - whole.start) // size for row in plan.rows})
        windows = [whole[batch * size : (batch + 1) * size] for batch in live]
        last, most = self._stages[-1], self.config.max_decode_iterations
        outputs = [last.no_outputs(size, most, needs.variant) for _ in windows]
        for iteration in range(plan.num_iterations):
            for batch, window in enumerate(windows):
                rows = [
                    replace(row, start=row.start + iteration)
                    for row in plan.rows
                    if row.slot in window
                ]
                self._tell(window, size, samples=True)
                hidden = None
                for stage in self._stages:
                    hidden = stage.decode(rows, window, hidden)
                index = np.where(pack_window(window, rows).most, window, self.config.max_slots)
                index = index.astype(np.int32)
                outputs[batch] = self._sample(hidden, index, outputs[batch], needs.variant)
        place = {
            slot: batch * size + i
            for batch, window in enumerate(windows)
            for i, slot in enumerate(window)
        }
        output_rows = np.array([place[row.slot] for row in plan.rows], np.int32)
        return DeviceHandle(plan, needs, outputs[-1].tokens, outputs, output_rows)

    def _micro_batch_size(self, num_slots: int) -> int:
        """Return the number of slots of a micro-batch of a window with `num_slots` slots."""
        return num_slots // gcd(num_slots, self._micro_batches)

    def _sample(
        self,
        hidden: Any,
        index: np.ndarray,
        outputs: Outputs,
        variant: Variant,
        masks: Any = None,
    ) -> Outputs:
        """Sample on the last stage and send the tokens to the others."""
        outputs, token, finite = self._stages[-1].sample(hidden, index, outputs, variant, masks)
        for stage in self._stages[:-1]:
            stage.send(index, token, finite)
        return outputs

    def _tell(self, slots: Iterable[int], num_rows: int, samples: bool) -> None:
        if self._on_pass is not None:
            self._on_pass(Pass(frozenset(slots), num_rows, samples))

    def _prompt_part(
        self, batch: Sequence[tuple[int, Row]], starts: Sequence[int], packed: Any, hidden: Any
    ) -> PromptPart:
        last = self._stages[-1]
        with last.programs.place.in_force():
            arrays = last.programs.prompt_logprobs(last.params, last.slots.state, hidden, packed)
        return PromptPart.of(arrays, batch, starts)

    def _raise_if_closed(self) -> None:
        if not self._stages:
            raise RuntimeClosedError("the executor was closed; create a new runtime")

    # ---- warm-up ----

    def warmup_steps(self) -> list[tuple[str, Callable[[], None]]]:
        """See `ModelExecutor`."""
        config = self.config
        steps: list[tuple[str, Callable[[], Any]]] = [
            ("slot edits", self._warm_edits),
            *(
                (f"mixed step, {num} tokens", partial(self._warm_mixed, num))
                for num in reversed(config.token_buckets)
            ),
        ]
        if config.has_encoder:
            for num in reversed(config.token_buckets):
                step = partial(self._encode, pack_rows(config, (), num)[0])
                steps.append((f"encoder, {num} tokens", step))
        for variant in Variant:
            name = variant.name.lower()
            for num in reversed(variant.sizes(config.head_buckets)):
                step = partial(self._warm_head, variant, num)
                steps.append((f"{name} sampling, {num} rows", step))
            sizes = {self._micro_batch_size(num) for num in variant.sizes(config.slot_buckets)}
            for num in sorted(sizes, reverse=True):
                step = partial(self._warm_decode, variant, num)
                steps.append((f"{name} decoding, {num} slots", step))
        return [(name, self._idly(step)) for name, step in steps]

    def use_idle_time(self) -> bool:
        """See `Executor`."""
        return False

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

    def _idly(self, step: Callable[[], Any]) -> Callable[[], None]:
        def without_requests() -> None:
            with ExitStack() as idle:
                for stage in self._stages:
                    idle.enter_context(stage.idle())
                step()

        return without_requests

    def _warm_edits(self) -> None:
        for stage in self._stages:
            with stage.programs.place.in_force():
                stage.slots.warm_up(takes_masks=self._takes_masks)

    def _warm_mixed(self, num_tokens: int) -> Any:
        batch, _ = pack_rows(self.config, (), num_tokens)
        hidden = row_hidden = None
        for stage in self._stages:
            hidden, row_hidden = stage.mixed(batch, hidden)
        self._prompt_part((), (), batch, hidden)
        return row_hidden

    def _warm_head(self, variant: Variant, num_rows: int) -> None:
        hidden = self._warm_mixed(self.config.token_buckets[0])
        self._warm_sampling(hidden, variant, num_rows, 1)
        if self._takes_masks:
            vocab_size = self._stages[-1].programs.model_config.vocab_size
            self._warm_sampling(hidden, variant, num_rows, 1, no_masks(num_rows, vocab_size))

    def _warm_decode(self, variant: Variant, num_rows: int) -> None:
        hidden = None
        for stage in self._stages:
            hidden = stage.decode((), range(num_rows), hidden)
        self._warm_sampling(hidden, variant, num_rows, self.config.max_decode_iterations)

    def _warm_sampling(
        self, hidden: Any, variant: Variant, num_rows: int, most: int, masks: Any = None
    ) -> None:
        index = np.full(num_rows, self.config.max_slots, np.int32)
        none = self._stages[-1].no_outputs(num_rows, most, variant)
        self._sample(hidden, index, none, variant, masks)
