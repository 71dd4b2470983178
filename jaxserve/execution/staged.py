"""The executor that carries out plans on the stages of a stage plan, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, final

import jax
import numpy as np

from jaxserve.core.errors import RuntimeClosedError
from jaxserve.execution.compilations import CompilationCounter
from jaxserve.execution.device_stage import DeviceStage
from jaxserve.execution.encoding import encode_prompts
from jaxserve.execution.handle import DeviceHandle, PromptPart
from jaxserve.execution.micro_batches import Pass, micro_batches
from jaxserve.execution.mixed_heads import verifying_arguments
from jaxserve.execution.page_copies import DevicePages
from jaxserve.execution.protocol import GroupRole
from jaxserve.execution.staged_loops import WindowPass, micro_batch_size, run_loop
from jaxserve.execution.weights import check_same, fitted
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.memory.relocation import Moves
from jaxserve.models.parts import ModelPart
from jaxserve.scheduling.kv.costs import SwapCosts
from jaxserve.scheduling.plan import Row, StepPlan
from jaxserve.steps.batches import ChoosingRows
from jaxserve.steps.outputs import Outputs
from jaxserve.steps.packing import (
    in_places,
    loop_sizes,
    no_masks,
    pack_choosing,
    pack_masks,
    pack_rows,
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
            if plan.is_decode_loop:
                return run_loop(self._stages, plan, needs, self._micro_batches, self._tell)
            return self._mixed(plan, needs)

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
        # those of the step; and if one has proposals, since a micro-batch may not end among them.
        is_one = plan.has_proposals or any(row.wants_prompt_logprobs for row in plan.rows)
        prompts = [row for row in plan.rows if row.encodes]
        marker: Any = self._encode(pack_rows(self.config, prompts)[0]) if prompts else None
        if prompts and len(prompts) == len(plan.rows):
            return DeviceHandle(plan, needs, marker, (), np.empty(0, np.int32))
        batches = [[(i, row) for i, row in enumerate(plan.rows) if not row.encodes]]
        if not is_one:
            smallest = self.config.token_buckets[0]
            batches = list(micro_batches(batches[0], self._micro_batches, smallest))
        outputs: list[Outputs] = []
        output_rows = np.full(len(plan.rows), -1, np.int32)
        prompt_part = None
        num_outputs = 0
        for batch in batches:
            batch = [batch[i] for i in sampling_first([row for _, row in batch])]
            parts = [(i, part) for i, row in batch for part in in_places(row)]
            packed, starts = pack_rows(self.config, [row for _, row in parts])
            sampling = [i for i, row in batch if row.samples]
            slots = frozenset(row.slot for _, row in batch)
            self._tell(Pass(slots, len(packed.token_row), samples=bool(sampling)))
            hidden = None
            for stage in self._stages:
                hidden, marker = stage.mixed(packed, hidden)
            if any(row.wants_prompt_logprobs for row in plan.rows):
                prompt_part = self._prompt_part(parts, starts, packed, hidden)
            if sampling:
                choose = self._verify if plan.has_proposals else self._sample_rows
                outputs.append(choose(plan, sampling, marker, needs.variant))
                output_rows[sampling] = num_outputs + np.arange(len(sampling))
                num_outputs += len(outputs[-1].num_tokens)
        marker = outputs[-1].tokens if outputs else marker
        return DeviceHandle(plan, needs, marker, outputs, output_rows, prompt_part)

    def _encode(self, batch: Any) -> jax.Array:
        """Encode whole prompts on the first stage, and write what each stage's layers see."""
        encoded = self._stages[0].encode(batch)
        for stage in self._stages:
            stage.write_encoded(batch, encoded)
        return encoded

    def _sample_rows(
        self, plan: StepPlan, sampling: Sequence[int], row_hidden: Any, variant: Variant
    ) -> Outputs:
        """Sample the next token of the plan's rows `sampling`, which come first in the batch."""
        rows = [plan.rows[i] for i in sampling]
        index = sampling_slots(self.config, rows, variant)
        none = self._stages[-1].no_outputs(len(index), 1, variant)
        masks = pack_masks(plan, sampling, len(index))
        return self._sample(row_hidden, index, none, variant, masks)

    def _verify(
        self, plan: StepPlan, sampling: Sequence[int], row_hidden: Any, variant: Variant
    ) -> Outputs:
        """`_sample_rows` where some of the rows have proposals, and so may get several tokens."""
        last = self._stages[-1].programs
        rows, masks = verifying_arguments(last, plan, sampling, variant, has_masks=False)
        return self._choose_verified(row_hidden, rows, masks, variant)

    def _choose_verified(
        self, row_hidden: Any, rows: ChoosingRows, masks: Any, variant: Variant
    ) -> Outputs:
        outputs, chosen = self._stages[-1].verify(row_hidden, rows, masks, variant)
        for stage in self._stages[:-1]:
            stage.send(np.asarray(rows.slot), chosen, np.asarray(rows.num_proposed))
        return outputs

    def _sample(
        self,
        hidden: Any,
        index: np.ndarray,
        outputs: Outputs,
        variant: Variant,
        masks: Any = None,
    ) -> Outputs:
        """Sample on the last stage and send the tokens to the others."""
        outputs, chosen = self._stages[-1].sample(hidden, index, outputs, variant, masks)
        for stage in self._stages[:-1]:
            stage.send(index, chosen)
        return outputs

    def _tell(self, new: Pass) -> None:
        if self._on_pass is not None:
            self._on_pass(new)

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
            for speculates in (False, True) if config.num_proposed else (False,):
                loop = "speculating loop" if speculates else "decoding"
                windows = loop_sizes(config, variant, speculates=speculates)
                sizes = {micro_batch_size(num, self._micro_batches) for num in windows}
                for num in sorted(sizes, reverse=True):
                    step = partial(self._warm_decode, variant, num, speculates)
                    steps.append((f"{name} {loop}, {num} slots", step))
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
        self._warm_sampling(hidden, variant, num_rows)
        if self._takes_masks:
            vocab_size = self._stages[-1].programs.model_config.vocab_size
            masks = no_masks(num_rows, vocab_size)
            self._warm_sampling(hidden, variant, num_rows, masks)
            if self.config.num_proposed:
                no_rows = pack_choosing(self.config, (), num_rows)
                self._choose_verified(hidden, no_rows, masks, variant)

    def _warm_decode(self, variant: Variant, num_rows: int, speculates: bool) -> None:
        window, last = range(num_rows), self._stages[-1]
        idle = WindowPass.of(last, window, (), variant, speculates=speculates)
        idle.iterate(self._stages, 0, variant)

    def _warm_sampling(
        self, hidden: Any, variant: Variant, num_rows: int, masks: Any = None
    ) -> None:
        index = np.full(num_rows, self.config.max_slots, np.int32)
        none = self._stages[-1].no_outputs(num_rows, 1, variant)
        self._sample(hidden, index, none, variant, masks)
