"""The executor that carries out plans on the stages of a stage plan, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, final

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.execution.model_executor import SubmittedStep
from jaxserve.execution.stages import DeviceStage, Hidden, StepExecutor, WarmupStep
from jaxserve.execution.weights import check_same, fitted
from jaxserve.models.parts import ModelPart
from jaxserve.scheduling.plan import Row, StepPlan
from jaxserve.steps.outputs import Outputs
from jaxserve.steps.packing import (
    DecodeWindow,
    decode_window,
    head_sizes,
    loop_sizes,
    no_masks,
    pack_choosing,
    pack_rows,
    pack_window,
)
from jaxserve.steps.proposals import Draft
from jaxserve.steps.sampling.sampler import SamplingNeeds, Variant
from jaxserve.steps.stages import Proposed


@final
@dataclass(frozen=True)
class Pass:
    """One pass of a micro-batch, `num_rows` with padding, through all stages, as submitted."""

    slots: frozenset[int]
    num_rows: int
    samples: bool


def micro_batches(
    rows: Sequence[tuple[int, Row]], most: int, smallest: int
) -> Iterator[list[tuple[int, Row]]]:
    """Cut rows into at most `most` micro-batches with about the same number of tokens each.

    Each micro-batch except the last has at least `smallest` tokens. A row that does not fit is cut
    in two, of which the second part samples. The order of rows stays, because a row may read KV
    that an earlier row writes.
    """
    total = sum(row.num_tokens for _, row in rows)
    size = max(smallest, -(-total // most))
    batch: list[tuple[int, Row]] = []
    left = size
    for i, row in rows:
        start, tokens, pooled = row.start, row.num_tokens, row.num_pooled
        own = row.slot, row.sequence_key
        while tokens > left:
            num = max(0, pooled - (tokens - left))
            if left:
                batch.append((i, Row(*own, start, left, max_new_tokens=0, num_pooled=num)))
            yield batch
            start, tokens, pooled = start + left, tokens - left, pooled - num
            batch, left = [], size
        batch.append((i, Row(*own, start, tokens, row.max_new_tokens, num_pooled=pooled)))
        left -= tokens
    yield batch


@final
@dataclass
class WindowPass:
    """The part of a loop that passes through the stages as one: some of its slots.

    Attributes:
      index: int32 [R], the window's slots; `max_slots` for a slot without a row.
      proposals: for the next iteration; None in a loop that does not speculate.
    """

    window: range
    rows: Sequence[Row]
    index: np.ndarray
    packed: DecodeWindow
    outputs: Outputs
    proposals: tuple[Draft, Proposed] | None

    @property
    def num_tokens(self) -> int:
        """Number of tokens that an iteration computes, including padding."""
        num_proposed = 0 if self.proposals is None else self.proposals[1].tokens.shape[1]
        return len(self.window) + num_proposed

    @classmethod
    def of(
        cls,
        last: DeviceStage,
        window: range,
        rows: Sequence[Row],
        variant: Variant,
        *,
        speculates: bool,
    ) -> WindowPass:
        """Return a window before the first iteration; the last stage proposes if it speculates."""
        config = last.programs.config
        num_proposed = config.num_proposed_beside(len(window)) if speculates else 0
        most = config.max_decode_iterations * (1 + num_proposed)
        outputs = last.no_outputs(len(window), most, variant, num_proposed)
        packed = pack_window(window, rows)
        index = np.where(packed.most, window, config.max_slots).astype(np.int32)
        proposals = last.propose(packed, outputs.num_tokens, num_proposed) if num_proposed else None
        return cls(window, rows, index, packed, outputs, proposals)

    def iterate(self, stages: Sequence[DeviceStage], iteration: int, variant: Variant) -> None:
        """Submit one iteration to all stages, and send the tokens of the last to the rest."""
        *others, last = stages
        proposed = None if self.proposals is None else self.proposals[1]
        hidden = None
        for stage in stages:
            hidden = stage.decode(self.rows, self.window, hidden, iteration, proposed)
        assert hidden is not None, "a model without stages"
        if self.proposals is None:
            self.outputs, chosen = last.sample_one(hidden, self.index, self.outputs, variant)
        else:
            self.outputs, chosen, self.proposals = last.choose(
                self.packed, hidden, self.outputs, self.proposals, variant
            )
        for stage in others:
            stage.send(self.index, chosen)


def micro_batch_size(num_slots: int, micro_batches: int) -> int:
    return num_slots // gcd(num_slots, micro_batches)


@final
class StagedExecutor(StepExecutor):
    """An executor over several stages, which compute different micro-batches at the same time.

    Its warm-up runs steps, so that one thread calls it. A decode loop runs all of its iterations,
    since only the devices know which sequences have ended.

    Args:
      embed: width of the hidden states that pass from stage to stage.
      micro_batches: a power of two.
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
        super().__init__(
            config,
            stages,
            whole,
            micro_batches=micro_batches,
            strict=strict,
            takes_masks=takes_masks,
        )
        self._parts = list(parts)
        self._embed = embed
        self._on_pass: Callable[[Pass], None] | None = None

    def watch(self, on_pass: Callable[[Pass], None]) -> None:
        """Call `on_pass` with every later pass, to measure the pipeline."""
        self._on_pass = on_pass

    def fitted(self, params: Any, *, partial: bool = False) -> list[Any]:
        """Return one entry per stage."""
        self._raise_if_closed()
        check_same(params, self._whole, partial=partial)
        return [
            fitted(part.params_of(params), stage.params, partial=partial)
            for part, stage in zip(self._parts, self._stages, strict=True)
        ]

    @property
    def params(self) -> list[Any]:
        return [stage.params for stage in self._stages]

    def update_params(self, params: list[Any]) -> None:
        for stage, own in zip(self._stages, params, strict=True):
            stage.update_params(own)

    def compiled_steps(self) -> list[list[Any]]:
        """Return the executables of each stage's largest mixed step and decode iteration."""
        self._raise_if_closed()
        return [
            stage.programs.compiled_stage_steps(
                stage.params,
                stage.pages.cache,
                self._embed if i else None,
                samples=stage is self._stages[-1],
            )
            for i, stage in enumerate(self._stages)
        ]

    # ---- steps ----

    def _batches(self, rows: list[tuple[int, Row]]) -> Iterable[list[tuple[int, Row]]]:
        return micro_batches(rows, self._micro_batches, self.config.token_buckets[0])

    def _before_pass(self, slots: Iterable[int], num_rows: int, *, samples: bool) -> None:
        if self._on_pass is not None:
            self._on_pass(Pass(frozenset(slots), num_rows, samples))

    def _decode(self, plan: StepPlan, needs: SamplingNeeds) -> SubmittedStep:
        """Submit all iterations of a decode loop."""
        variant, last = needs.variant, self._stages[-1]
        whole, num_proposed = decode_window(self.config, plan, variant)
        size = micro_batch_size(len(whole), self._micro_batches)
        passes: list[WindowPass] = []
        # Micro-batches without rows are left out, unless no row exists at all, as in measurements.
        batches = {(row.slot - whole.start) // size for row in plan.rows}
        for batch in sorted(batches or range(len(whole) // size)):
            window = whole[batch * size : (batch + 1) * size]
            rows = [row for row in plan.rows if row.slot in window]
            speculates = num_proposed > 0
            passes.append(WindowPass.of(last, window, rows, variant, speculates=speculates))
        for iteration in range(plan.num_iterations):
            for each in passes:
                self._before_pass(each.window, each.num_tokens, samples=True)
                each.iterate(self._stages, iteration, variant)
        slots = [slot for each in passes for slot in each.window]
        place = {slot: i for i, slot in enumerate(slots)}
        output_rows = np.array([place[row.slot] for row in plan.rows], np.int32)
        outputs = [each.outputs for each in passes]
        return SubmittedStep(plan, needs, outputs[-1].tokens, outputs, output_rows)

    # ---- warm-up ----

    def _executables(self) -> list[WarmupStep]:
        return [(name, partial(self._idly, step)) for name, step in self._idle_steps()]

    def _idly(self, step: Callable[[], Any]) -> None:
        """Run a step on stages whose slots do not advance."""
        with ExitStack() as idle:
            for stage in self._stages:
                idle.enter_context(stage.idle())
            step()

    def _idle_steps(self) -> Iterator[WarmupStep]:
        config = self.config
        yield "slot edits", self._warm_edits
        for num in reversed(config.token_buckets):
            yield f"mixed step, {num} tokens", partial(self._warm_body, num)
        if config.num_host_pages:
            yield "page copies", self._warm_copies
            if config.num_incoming_pages:
                for num in reversed(config.coarse_token_buckets):
                    step = partial(self._warm_body, num, brings_pages=True)
                    yield f"mixed step with pages, {num} tokens", step
        if config.has_encoder:
            for num in reversed(config.token_buckets):
                step = partial(self._encode, pack_rows(config, (), num)[0])
                yield f"encoder, {num} tokens", step
        for variant in Variant:
            name = variant.name.lower()
            for num in reversed(variant.sizes(config.head_buckets)):
                yield f"{name} sampling, {num} rows", partial(self._warm_head, variant, num)
            if self._takes_masks:
                for num in reversed(head_sizes(config, variant, has_masks=True)):
                    step = partial(self._warm_masked_head, variant, num)
                    yield f"{name} sampling with masks, {num} rows", step
            for speculates in (False, True) if config.num_proposed else (False,):
                loop = "speculating loop" if speculates else "decoding"
                windows = loop_sizes(config, variant, speculates=speculates)
                sizes = {micro_batch_size(num, self._micro_batches) for num in windows}
                for num in sorted(sizes, reverse=True):
                    step = partial(self._warm_loop, variant, num, speculates)
                    yield f"{name} {loop}, {num} slots", step

    def _warm_edits(self) -> None:
        for stage in self._stages:
            stage.slots.warm_up(takes_masks=self._takes_masks)
            for _, prepare in stage.states.preparations(stage.pages):
                prepare()

    def _warm_copies(self) -> None:
        for stage in self._stages:
            for _, prepare in stage.pages.preparations():
                prepare()

    def _warm_body(self, num_tokens: int, *, brings_pages: bool = False) -> Hidden:
        batch, _ = pack_rows(self.config, (), num_tokens)
        hidden = self._pass(batch, brings_pages=brings_pages)
        self._stages[-1].prompt_logprobs(hidden, batch)
        self._stages[-1].pool(hidden, batch, ())
        return hidden

    def _warm_head(self, variant: Variant, num_rows: int) -> None:
        hidden = self._warm_body(self.config.token_buckets[0])
        self._sample(hidden, self._no_slots(num_rows), None, variant)

    def _warm_masked_head(self, variant: Variant, num_rows: int) -> None:
        hidden = self._warm_body(self.config.token_buckets[0])
        masks = no_masks(num_rows, self._stages[-1].programs.model_config.vocab_size)
        self._sample(hidden, self._no_slots(num_rows), masks, variant)
        if self.config.num_proposed:
            self._verify(hidden, pack_choosing(self.config, (), num_rows), masks, variant)

    def _no_slots(self, num_rows: int) -> np.ndarray:
        return np.full(num_rows, self.config.max_slots, np.int32)

    def _warm_loop(self, variant: Variant, num_rows: int, speculates: bool) -> None:
        last = self._stages[-1]
        idle = WindowPass.of(last, range(num_rows), (), variant, speculates=speculates)
        idle.iterate(self._stages, 0, variant)
