"""Carries out plans on the stages of a stage plan, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any, final

import jax
import numpy as np

from jaxserve.core.errors import RuntimeClosedError
from jaxserve.execution.compilations import CompilationCounter
from jaxserve.execution.device_stage import DeviceStage
from jaxserve.execution.handle import DeviceHandle, PromptPart
from jaxserve.execution.protocol import GroupRole
from jaxserve.execution.weights import check_same, fitted
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.memory.relocation import Moves
from jaxserve.models.batch import KVCache
from jaxserve.models.parts import ModelPart
from jaxserve.scheduling.plan import Needs, Row, StepPlan
from jaxserve.scheduling.supervisor import SwapCosts
from jaxserve.steps.functions import Outputs
from jaxserve.steps.packing import pack_needs, pack_rows, pack_sampling, sampling_first
from jaxserve.steps.sampling.sampler import SamplingNeeds
from predictor import Refinement


@final
@dataclass(frozen=True)
class Pass:
    """A micro-batch that goes once through all stages, in the order of submission.

    Attributes:
      slots: whose tokens it computes.
      num_rows: that the stages compute, padding included.
      samples: whether the last stage samples behind it.
    """

    slots: frozenset[int]
    num_rows: int
    samples: bool


@final
class StagedExecutor:
    """An `Executor` over several stages, which work at once on different micro-batches.

    Everything is submitted in the order in which the devices should do it, and nothing waits: the
    arrays that pass from stage to stage keep the order. A decode loop runs all of its iterations,
    since only the devices know who has ended.

    Args:
      parts: of the model, one a stage, as the stages were made from.
      whole: structure, shapes and dtypes of the whole model's parameters.
      embed: width of what passes from stage to stage.
      micro_batches: most that a step is cut into; a power of two.
      strict: raise on any compilation after the warm-up.
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
    ):
        self.config = stages[0].programs.config
        self.swap_costs: SwapCosts | None = None
        self.refinement: Refinement | None = None
        self.host_memory: HostMemory | None = None
        self.group: GroupRole | None = None
        self.can_resize = True
        self._stages = list(stages)
        self._parts = list(parts)
        self._whole = whole
        self._embed = embed
        self._micro_batches = micro_batches
        self._compilations = CompilationCounter(strict=strict)
        # Sizes of the caches that every executable is there for.
        self._warm_num_pages: set[int] = set()
        self._on_pass: Callable[[Pass], None] | None = None

    @property
    def num_compilations(self) -> int:
        """See `ModelExecutor`."""
        return self._compilations.count

    def watch(self, on_pass: Callable[[Pass], None]) -> None:
        """Call `on_pass` with every pass from here on, for measurements of the pipeline."""
        self._on_pass = on_pass

    def submit(self, plan: StepPlan) -> DeviceHandle:
        """See `Executor`."""
        self._raise_if_closed()
        with self._compilations.watch(plan):
            for stage in self._stages:
                stage.edit(plan)
            return self._decode(plan) if plan.is_decode_loop else self._mixed(plan)

    def fitted(self, params: Any) -> list[Any]:
        """See `ModelExecutor`: each stage's part."""
        self._raise_if_closed()
        check_same(params, self._whole)
        return [
            fitted(part.params_of(params), stage.params)
            for part, stage in zip(self._parts, self._stages, strict=True)
        ]

    def update_params(self, params: list[Any]) -> None:
        """See `ModelExecutor`."""
        for stage, own in zip(self._stages, params, strict=True):
            stage.params = own

    @property
    def stages(self) -> tuple[DeviceStage, ...]:
        """The stages in order; none once closed."""
        return tuple(self._stages)

    def compiled_steps(self) -> list[list[Any]]:
        """Each stage's largest mixed step and decode iteration, to read what XLA made of them."""
        self._raise_if_closed()
        return [
            stage.programs.compiled_stage_steps(
                stage.params, stage.pages.cache, self._embed if i else None
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
        self._compilations.is_warm = num_pages in self._warm_num_pages

    @property
    def num_buffers(self) -> int:
        """See `ModelExecutor`; of the stage with the fewest."""
        return min(stage.pages.num_buffers for stage in self._stages)

    @property
    def device(self) -> Any:
        """See `ModelExecutor`; of the stage whose pages are the largest."""
        largest = max(self._stages, key=lambda stage: _shard_bytes(stage.pages.cache))
        return next(iter(largest.programs.place.whole.device_set))

    def close(self) -> None:
        """See `Executor`."""
        if self._stages:
            for stage in self._stages:
                stage.delete()
            self._compilations.close()
        self._stages = []

    # ---- steps ----

    def _mixed(self, plan: StepPlan) -> DeviceHandle:
        # One batch where somebody asks for the log-probabilities of a prompt: then its spans are
        # those of the step.
        wants_prompts = any(row.wants_prompt_logprobs for row in plan.rows)
        batches = [list(enumerate(plan.rows))]
        if not wants_prompts:
            smallest = self.config.token_buckets[0]
            batches = list(_cut(batches[0], self._micro_batches, smallest))
        needs = pack_needs(plan.needs)
        outputs: list[Outputs] = []
        output_rows = np.full(len(plan.rows), -1, np.int32)
        prompt_part = None
        marker: Any = None
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
                index = pack_sampling(self.config, rows)
                none = self._stages[-1].no_outputs(len(index), 1)
                outputs.append(self._sample(marker, index, none, 0, needs))
                sampling = [i for i, row in batch if row.samples]
                output_rows[sampling] = num_outputs + np.arange(len(sampling))
                num_outputs += len(index)
        marker = outputs[-1].tokens if outputs else marker
        return DeviceHandle(plan, marker, outputs, output_rows, prompt_part)

    def _decode(self, plan: StepPlan) -> DeviceHandle:
        size = plan.window_size // gcd(plan.window_size, self._micro_batches)
        window = range(plan.window_start, plan.window_start + plan.window_size)
        live = {(row.slot - window.start) // size for row in plan.rows}
        starts = [window.start + batch * size for batch in sorted(live)]
        last = self._stages[-1]
        outputs = [last.no_outputs(size, self.config.max_decode_iterations) for _ in starts]
        needs = pack_needs(plan.needs)
        for iteration in range(plan.num_iterations):
            for batch, start in enumerate(starts):
                rows = [
                    replace(row, start=row.start + iteration)
                    for row in plan.rows
                    if start <= row.slot < start + size
                ]
                self._tell(range(start, start + size), size, samples=True)
                hidden = None
                for stage in self._stages:
                    hidden = stage.decode(rows, start, size, hidden)
                index = np.arange(start, start + size, dtype=np.int32)
                outputs[batch] = self._sample(hidden, index, outputs[batch], iteration, needs)
        place = {start: batch * size for batch, start in enumerate(starts)}
        output_rows = [
            place[row.slot - (row.slot - window.start) % size] + (row.slot - window.start) % size
            for row in plan.rows
        ]
        return DeviceHandle(plan, outputs[-1].tokens, outputs, np.array(output_rows, np.int32))

    def _sample(
        self,
        hidden: Any,
        index: np.ndarray,
        outputs: Outputs,
        iteration: int,
        needs: SamplingNeeds,
    ) -> Outputs:
        """Sample on the last stage and tell the others."""
        outputs, token, finite = self._stages[-1].sample(hidden, index, outputs, iteration, needs)
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
        spans = {
            i: slice(start, start + row.num_tokens)
            for (i, row), start in zip(batch, starts, strict=True)
            if row.wants_prompt_logprobs
        }
        return PromptPart(arrays, spans)

    def _raise_if_closed(self) -> None:
        if not self._stages:
            raise RuntimeClosedError("the executor was closed; create a new runtime")

    # ---- warm-up ----

    def warmup_steps(self) -> list[tuple[str, Callable[[], None]]]:
        """See `ModelExecutor`."""
        config = self.config
        sizes = sorted({size // gcd(size, self._micro_batches) for size in config.slot_buckets})
        steps: list[tuple[str, Callable[[], Any]]] = [
            ("slot edits", self._warm_edits),
            *(
                (f"mixed step, {num} tokens", partial(self._warm_mixed, num))
                for num in reversed(config.token_buckets)
            ),
            *(
                (f"sampling, {num} rows", partial(self._warm_head, num))
                for num in reversed(config.head_buckets)
            ),
            *(
                (f"decoding, {num} slots", partial(self._warm_decode, num))
                for num in reversed(sizes)
            ),
        ]
        return [(name, self._idly(step)) for name, step in steps]

    def finish_warmup(self) -> None:
        """See `ModelExecutor`."""
        for stage in self._stages:
            jax.block_until_ready((stage.pages.cache, stage.slots.state))
        self._warm_num_pages.add(self.config.num_pages)
        self._compilations.is_warm = True

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
                stage.slots.warm_up()

    def _warm_mixed(self, num_tokens: int) -> Any:
        batch, _ = pack_rows(self.config, (), num_tokens)
        hidden = row_hidden = None
        for stage in self._stages:
            hidden, row_hidden = stage.mixed(batch, hidden)
        self._prompt_part((), (), batch, hidden)
        return row_hidden

    def _warm_head(self, num_rows: int) -> None:
        hidden = self._warm_mixed(self.config.token_buckets[0])
        self._warm_sampling(hidden, num_rows, 1)

    def _warm_decode(self, num_rows: int) -> None:
        hidden = None
        for stage in self._stages:
            hidden = stage.decode((), 0, num_rows, hidden)
        self._warm_sampling(hidden, num_rows, self.config.max_decode_iterations)

    def _warm_sampling(self, hidden: Any, num_rows: int, num_iterations: int) -> None:
        index = np.full(num_rows, self.config.max_slots, np.int32)
        none = self._stages[-1].no_outputs(num_rows, num_iterations)
        self._sample(hidden, index, none, 0, pack_needs(Needs()))


def _shard_bytes(cache: KVCache) -> int:
    """On one device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(cache))


def _cut(
    rows: Sequence[tuple[int, Row]], most: int, smallest: int
) -> Iterator[list[tuple[int, Row]]]:
    """At most `most` micro-batches of as equal numbers of tokens as can be, none under `smallest`.

    A row that would not fit is cut: what comes first attends, what comes later is sampled from.
    The order stays, for rows may read what those before them write.
    """
    total = sum(row.num_tokens for _, row in rows)
    size = max(smallest, -(-total // most))
    batch: list[tuple[int, Row]] = []
    left = size
    for i, row in rows:
        start, tokens = row.start, row.num_tokens
        while tokens > left:
            if left:
                batch.append((i, Row(row.slot, row.sequence_key, start, left, samples=False)))
            yield batch
            start, tokens = start + left, tokens - left
            batch, left = [], size
        batch.append((i, Row(row.slot, row.sequence_key, start, tokens, row.samples)))
        left -= tokens
    yield batch
