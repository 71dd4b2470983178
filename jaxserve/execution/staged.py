"""The executor that carries out plans on the stages of a stage plan, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from math import gcd
from typing import Any, final

import jax
import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import RuntimeClosedError
from jaxserve.execution.device import verifying_arguments
from jaxserve.execution.device_stage import DeviceStage
from jaxserve.execution.encoding import encode_prompts
from jaxserve.execution.model_executor import ModelExecutor, PooledPart, PromptPart, SubmittedStep
from jaxserve.execution.pages import (
    PAGES_A_CALL,
    DevicePages,
    KeptSwapCosts,
    SwapCostMeter,
    measured_costs,
    num_incoming,
    work_of_a_position,
)
from jaxserve.execution.weights import check_same, fitted
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.memory.page_pool import NULL_PAGE, Moves
from jaxserve.models.batch import KVCache
from jaxserve.models.parts import ModelPart
from jaxserve.scheduling.kv.manager import SwapCosts
from jaxserve.scheduling.plan import PageCopies, Row, StepPlan
from jaxserve.steps.outputs import Outputs
from jaxserve.steps.packing import (
    ChoosingRows,
    DecodeWindow,
    body_size,
    decode_window,
    in_places,
    loop_sizes,
    no_masks,
    pack_choosing,
    pack_masks,
    pack_rows,
    pack_window,
    sampling_first,
    sampling_slots,
)
from jaxserve.steps.proposals import Draft
from jaxserve.steps.sampling.sampler import SamplingNeeds, Variant
from jaxserve.steps.stages import Proposed

_Step = tuple[str, Callable[[], Any]]


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
class StagedHostMemory:
    """A `HostMemory` of pages that consist of the contents on each stage, in order."""

    def __init__(self, stages: Sequence[DeviceStage]):
        self._stages = stages

    def has_arrived(self, host_page: int) -> bool:
        return all(stage.pages.has_arrived(host_page) for stage in self._stages)

    def read_host_page(self, host_page: int) -> bytes:
        return b"".join(stage.pages.read_host_page(host_page) for stage in self._stages)

    def write_host_page(self, host_page: int, contents: bytes) -> None:
        start = 0
        for stage in self._stages:
            num_bytes = stage.pages.host_page_bytes
            stage.pages.write_host_page(host_page, contents[start : start + num_bytes])
            start += num_bytes

    def fingerprint(self) -> bytes:
        """Return a hash that also depends on the stage plan, as contents of pages do."""
        digest = blake2b(digest_size=16)
        for stage in self._stages:
            digest.update(stage.fingerprint())
        return digest.digest()


@final
class StagedSteps:
    """Submits mixed steps to all stages, and sends the tokens of the last stage to the rest."""

    def __init__(
        self, stages: Sequence[DeviceStage], micro_batches: int, tell: Callable[[Pass], None]
    ):
        self._stages = stages
        self._micro_batches = micro_batches
        self._tell = tell

    @property
    def _config(self) -> EngineConfig:
        return self._stages[0].programs.config

    def mixed(self, plan: StepPlan, needs: SamplingNeeds, late: PageCopies = ()) -> SubmittedStep:
        """Submit a plan's mixed step, with the `late` copies in the first micro-batch."""
        # The step is one batch if a row returns prompt log-probabilities, so that their spans are
        # the step's, or if a row has proposals, since a micro-batch may not end among them.
        is_one = plan.has_proposals or any(row.wants_prompt_logprobs for row in plan.rows)
        prompts = [row for row in plan.rows if row.encodes]
        marker: Any = self.encode(pack_rows(self._config, prompts)[0]) if prompts else None
        if prompts and len(prompts) == len(plan.rows) and not late:
            return SubmittedStep(plan, needs, marker, (), np.empty(0, np.int32))
        batches = [[(i, row) for i, row in enumerate(plan.rows) if not row.encodes]]
        if not is_one:
            smallest = self._config.token_buckets[0]
            batches = list(micro_batches(batches[0], self._micro_batches, smallest))
        outputs: list[Outputs] = []
        output_rows = np.full(len(plan.rows), -1, np.int32)
        prompt_part = None
        pooled: list[PooledPart] = []
        num_outputs = 0
        for batch in batches:
            batch = [batch[i] for i in sampling_first([row for _, row in batch])]
            parts = [(i, part) for i, row in batch for part in in_places(row)]
            rows = [row for _, row in parts]
            num_tokens = body_size(self._config, rows, is_coarse=bool(late))
            packed, starts = pack_rows(self._config, rows, num_tokens)
            sampling = [i for i, row in batch if row.samples]
            slots = frozenset(row.slot for _, row in batch)
            self._tell(Pass(slots, len(packed.token_row), samples=bool(sampling)))
            hidden, marker = self.pass_through(packed, late)
            late = ()
            if any(row.wants_prompt_logprobs for row in plan.rows):
                prompt_part = self.prompt_part(parts, starts, packed, hidden)
            pool = partial(self.pool, hidden, marker, packed)
            if (found := PooledPart.of(parts, pool)) is not None:
                pooled.append(found)
            if sampling:
                choose = self._verify if plan.has_proposals else self._sample_rows
                outputs.append(choose(plan, sampling, marker, needs.variant))
                output_rows[sampling] = num_outputs + np.arange(len(sampling))
                num_outputs += len(outputs[-1].num_tokens)
        marker = outputs[-1].tokens if outputs else marker
        return SubmittedStep(plan, needs, marker, outputs, output_rows, prompt_part, pooled)

    def pool(self, hidden: Any, row_hidden: Any, packed: Any, rows: Sequence[Row]) -> jax.Array:
        last = self._stages[-1]
        with last.programs.place.in_force():
            return last.programs.pool(last.params, hidden, row_hidden, packed, rows)

    def pass_through(
        self, packed: Any, late: PageCopies = (), *, brings_pages: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """Run a micro-batch through all stages; return the output of the last.

        Each stage makes the `late` copies from the host before its attention, layer by layer. If
        `brings_pages`, the executables of such copies run even if there are none.
        """
        hidden = row_hidden = None
        for stage in self._stages:
            incoming = stage.incoming(late) if late or brings_pages else None
            hidden, row_hidden = stage.mixed(packed, hidden, incoming)
        assert hidden is not None and row_hidden is not None, "a model without stages"
        return hidden, row_hidden

    def encode(self, batch: Any) -> jax.Array:
        """Encode whole prompts on the first stage, and write keys and values on every stage."""
        encoded = self._stages[0].encode(batch)
        for stage in self._stages:
            stage.write_encoded(batch, encoded)
        return encoded

    def choose_verified(
        self, row_hidden: Any, rows: ChoosingRows, masks: Any, variant: Variant
    ) -> Outputs:
        """Choose tokens of rows with proposals on the last stage, and send them to the rest."""
        outputs, chosen = self._stages[-1].verify(row_hidden, rows, masks, variant)
        for stage in self._stages[:-1]:
            stage.send(np.asarray(rows.slot), chosen, np.asarray(rows.num_proposed))
        return outputs

    def sample(
        self,
        hidden: Any,
        index: np.ndarray,
        outputs: Outputs,
        variant: Variant,
        masks: Any = None,
    ) -> Outputs:
        """Sample on the last stage and send the tokens to the rest."""
        outputs, chosen = self._stages[-1].sample(hidden, index, outputs, variant, masks)
        for stage in self._stages[:-1]:
            stage.send(index, chosen)
        return outputs

    def prompt_part(
        self, batch: Sequence[tuple[int, Row]], starts: Sequence[int], packed: Any, hidden: Any
    ) -> PromptPart:
        last = self._stages[-1]
        with last.programs.place.in_force():
            arrays = last.programs.prompt_logprobs(last.params, last.slots.state, hidden, packed)
        return PromptPart.of(arrays, batch, starts)

    def _sample_rows(
        self, plan: StepPlan, sampling: Sequence[int], row_hidden: Any, variant: Variant
    ) -> Outputs:
        """Sample the next token of the plan's rows `sampling`, which come first in the batch."""
        rows = [plan.rows[i] for i in sampling]
        index = sampling_slots(self._config, rows, variant)
        none = self._stages[-1].no_outputs(len(index), 1, variant)
        masks = pack_masks(plan, sampling, len(index))
        return self.sample(row_hidden, index, none, variant, masks)

    def _verify(
        self, plan: StepPlan, sampling: Sequence[int], row_hidden: Any, variant: Variant
    ) -> Outputs:
        """Choose tokens for rows of which some have proposals and may get several tokens."""
        last = self._stages[-1].programs
        rows, masks = verifying_arguments(last, plan, sampling, variant, has_masks=False)
        return self.choose_verified(row_hidden, rows, masks, variant)


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
            self.outputs, chosen = last.sample(hidden, self.index, self.outputs, variant)
        else:
            self.outputs, chosen, self.proposals = last.choose(
                self.packed, hidden, self.outputs, self.proposals, variant
            )
        for stage in others:
            stage.send(self.index, chosen)


def run_loop(
    stages: Sequence[DeviceStage],
    plan: StepPlan,
    needs: SamplingNeeds,
    micro_batches: int,
    tell: Callable[[Pass], None],
) -> SubmittedStep:
    """Submit all iterations of a decode loop; call `tell` with each pass of a micro-batch."""
    variant, last = needs.variant, stages[-1]
    whole, num_proposed = decode_window(last.programs.config, plan, variant)
    size = micro_batch_size(len(whole), micro_batches)
    passes: list[WindowPass] = []
    # Micro-batches without rows are left out, unless there is no row at all, as in measurements.
    batches = {(row.slot - whole.start) // size for row in plan.rows}
    for batch in sorted(batches or range(len(whole) // size)):
        window = whole[batch * size : (batch + 1) * size]
        rows = [row for row in plan.rows if row.slot in window]
        speculates = num_proposed > 0
        passes.append(WindowPass.of(last, window, rows, variant, speculates=speculates))
    for iteration in range(plan.num_iterations):
        for each in passes:
            tell(Pass(frozenset(each.window), each.num_tokens, samples=True))
            each.iterate(stages, iteration, variant)
    slots = [slot for each in passes for slot in each.window]
    place = {slot: i for i, slot in enumerate(slots)}
    output_rows = np.array([place[row.slot] for row in plan.rows], np.int32)
    outputs = [each.outputs for each in passes]
    return SubmittedStep(plan, needs, outputs[-1].tokens, outputs, output_rows)


def micro_batch_size(num_slots: int, micro_batches: int) -> int:
    return num_slots // gcd(num_slots, micro_batches)


@final
class StagedWarmup:
    """Compiles every executable by running it on stages whose slots do not advance."""

    def __init__(
        self,
        config: EngineConfig,
        stages: Sequence[DeviceStage],
        steps: StagedSteps,
        micro_batches: int,
        *,
        takes_masks: bool,
    ):
        self._config = config
        self._stages = stages
        self._steps = steps
        self._micro_batches = micro_batches
        self._takes_masks = takes_masks

    def steps(self) -> list[_Step]:
        return [(name, partial(self._idly, step)) for name, step in self._all()]

    def _all(self) -> Iterator[_Step]:
        config = self._config
        yield "slot edits", self._edits
        for num in reversed(config.token_buckets):
            yield f"mixed step, {num} tokens", partial(self._mixed, num)
        if config.num_host_pages:
            yield "page copies", self._copies
            if config.num_incoming_pages:
                for num in reversed(config.coarse_token_buckets):
                    step = partial(self._mixed, num, brings_pages=True)
                    yield f"mixed step with pages, {num} tokens", step
        if config.has_encoder:
            for num in reversed(config.token_buckets):
                step = partial(self._steps.encode, pack_rows(config, (), num)[0])
                yield f"encoder, {num} tokens", step
        for variant in Variant:
            yield from self._sampling(variant)

    def _sampling(self, variant: Variant) -> Iterator[_Step]:
        config, name = self._config, variant.name.lower()
        for num in reversed(variant.sizes(config.head_buckets)):
            yield f"{name} sampling, {num} rows", partial(self._head, variant, num)
        for speculates in (False, True) if config.num_proposed else (False,):
            loop = "speculating loop" if speculates else "decoding"
            windows = loop_sizes(config, variant, speculates=speculates)
            sizes = {micro_batch_size(num, self._micro_batches) for num in windows}
            for num in sorted(sizes, reverse=True):
                step = partial(self._decode, variant, num, speculates)
                yield f"{name} {loop}, {num} slots", step

    def _edits(self) -> None:
        for stage in self._stages:
            with stage.programs.place.in_force():
                stage.slots.warm_up(takes_masks=self._takes_masks)

    def _copies(self) -> None:
        for stage in self._stages:
            for _, prepare in stage.pages.preparations():
                prepare()

    def _mixed(self, num_tokens: int, *, brings_pages: bool = False) -> Any:
        batch, _ = pack_rows(self._config, (), num_tokens)
        hidden, row_hidden = self._steps.pass_through(batch, brings_pages=brings_pages)
        self._steps.prompt_part((), (), batch, hidden)
        self._steps.pool(hidden, row_hidden, batch, ())
        return row_hidden

    def _head(self, variant: Variant, num_rows: int) -> None:
        hidden = self._mixed(self._config.token_buckets[0])
        self._sample(hidden, variant, num_rows)
        if self._takes_masks:
            vocab_size = self._stages[-1].programs.model_config.vocab_size
            masks = no_masks(num_rows, vocab_size)
            self._sample(hidden, variant, num_rows, masks)
            if self._config.num_proposed:
                no_rows = pack_choosing(self._config, (), num_rows)
                self._steps.choose_verified(hidden, no_rows, masks, variant)

    def _decode(self, variant: Variant, num_rows: int, speculates: bool) -> None:
        window, last = range(num_rows), self._stages[-1]
        idle = WindowPass.of(last, window, (), variant, speculates=speculates)
        idle.iterate(self._stages, 0, variant)

    def _sample(self, hidden: Any, variant: Variant, num_rows: int, masks: Any = None) -> None:
        index = np.full(num_rows, self._config.max_slots, np.int32)
        none = self._stages[-1].no_outputs(num_rows, 1, variant)
        self._steps.sample(hidden, index, none, variant, masks)

    def _idly(self, step: Callable[[], Any]) -> None:
        with ExitStack() as idle:
            for stage in self._stages:
                idle.enter_context(stage.idle())
            step()


@final
class StagedExecutor(ModelExecutor):
    """An executor over several stages, which compute different micro-batches at the same time.

    Its warm-up runs steps, so that one thread calls it. The host submits all work in the order in
    which the devices run it, and does not wait: the arrays that pass from stage to stage keep the
    order. A decode loop runs all of its iterations, since only the devices know which sequences
    have ended.

    Args:
      config: the stages' configuration, with the number of host pages that each of them has.
      whole: structure, shapes and dtypes of the whole model's parameters.
      embed: width of the hidden states that pass from stage to stage.
      micro_batches: maximum number of micro-batches of a step; a power of two.
      strict: raise on any compilation after the warm-up.
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
        super().__init__(config, strict=strict)
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
        self._on_pass: Callable[[Pass], None] | None = None

    @property
    def swap_costs(self) -> SwapCosts | None:
        return self._swap_costs.costs

    @property
    def host_memory(self) -> HostMemory | None:
        return self._host_memory

    def watch(self, on_pass: Callable[[Pass], None]) -> None:
        """Call `on_pass` with every later pass, to measure the pipeline."""
        self._on_pass = on_pass

    def submit(self, plan: StepPlan) -> SubmittedStep:
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
        self._raise_if_closed()
        return encode_prompts(self._stages[0].programs, self._stages[0].params, prompts)

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

    def drop_params(self) -> None:
        for stage in self._stages:
            stage.drop_params()

    @property
    def stages(self) -> tuple[DeviceStage, ...]:
        """The stages in order; empty after `close`."""
        return tuple(self._stages)

    @property
    def page_pools(self) -> tuple[DevicePages, ...]:
        return tuple(stage.pages for stage in self._stages)

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

    def resize(self, num_pages: int, moves: Moves) -> None:
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
        """The minimum over the stages."""
        return min(stage.pages.num_buffers for stage in self._stages)

    @property
    def device(self) -> Any:
        """A device of the stage whose pages are the largest."""
        largest = max(self._stages, key=lambda stage: stage.pages.shard_bytes)
        return next(iter(largest.programs.place.whole.device_set))

    def reset(self) -> bool:
        for stage in self._stages:
            stage.renew()
        return True

    def close(self) -> None:
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
        warmup = StagedWarmup(
            self.config,
            self._stages,
            self._steps,
            self._micro_batches,
            takes_masks=self._takes_masks,
        )
        steps = warmup.steps()
        if self._swap_costs.is_missing:
            steps.append(("page swaps", self._swap_costs.measure))
        return steps

    def use_idle_time(self) -> bool:
        """Do the next timing of page swaps."""
        if not (self._swap_costs.is_missing and self.is_warm):
            return False
        self._swap_costs.measure_on()
        return True

    def finish_warmup(self) -> None:
        for stage in self._stages:
            jax.block_until_ready((stage.pages.cache, stage.slots.state))
        super().finish_warmup()

    def _swap(self, out: PageCopies, back: PageCopies) -> None:
        """Copy pages to the host, then from it; the stages' copies in one direction overlap."""
        for stage in self._stages:
            stage.swap(out, ())
        for stage in self._stages:
            stage.swap((), back)

    def _swap_timings(self) -> Iterator[SwapCosts | None]:
        """Time copies and prefill on all stages together, so that overlapping work counts once."""
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
            swap,
            prefill,
            num_pages=PAGES_A_CALL,
            num_tokens=self._micro_batches * len(batch.token_row),
            position_work=work_of_a_position(
                [stage.programs.model_config for stage in self._stages], self._whole
            ),
        )
