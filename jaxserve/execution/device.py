"""The executor that carries out plans on a JAX device or mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, final

import jax
import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.execution.device_slots import DeviceSlots
from jaxserve.execution.model_executor import ModelExecutor, SubmittedStep
from jaxserve.execution.pages import DevicePages
from jaxserve.execution.stages import DeviceStage, StepExecutor, WarmupStep
from jaxserve.execution.weights import fitted
from jaxserve.memory.page_pool import Moves
from jaxserve.models.batch import KVCache
from jaxserve.scheduling.plan import StepPlan
from jaxserve.steps.packing import (
    decode_window,
    head_sizes,
    loop_sizes,
    no_masks,
    pack_choosing,
    pack_rows,
    pack_window,
)
from jaxserve.steps.preparation import Preparation
from jaxserve.steps.programs import Programs
from jaxserve.steps.sampling.sampler import SamplingNeeds, Variant
from jaxserve.steps.step_function import abstract

# Seconds before executables are compiled behind requests, if the first ones that are needed were
# loaded early: a process that answers one prompt ends before.
_DELAY_S = 4.0

_SMALLEST, _LARGER = slice(1), slice(1, None)


@final
class DeviceExecutor(StepExecutor):
    """An executor of a whole model on a device or mesh, whose decode loops run on the device."""

    prepares_in_parallel = True

    def __init__(
        self,
        config: EngineConfig,
        programs: Programs,
        params: Any,
        cache: KVCache,
        *,
        snapshots: KVCache | None = None,
        strict: bool = False,
        takes_masks: bool = False,
    ):
        self._stage = DeviceStage(
            programs,
            params,
            cache,
            config.num_host_pages,
            samples=True,
            snapshots=snapshots,
            num_host_snapshots=config.num_host_snapshots,
        )
        super().__init__(
            config, (self._stage,), abstract(params), strict=strict, takes_masks=takes_masks
        )
        self._programs = programs
        self._preparing: Preparation | None = None

    def fitted(self, params: Any, *, partial: bool = False) -> Any:
        self._raise_if_closed()
        return fitted(params, self._stage.params, partial=partial)

    @property
    def params(self) -> Any:
        """The parameters of the next step; None once closed."""
        return self._stage.params

    @property
    def whole_params(self) -> Any:
        return self.params

    def update_params(self, params: Any) -> None:
        self._stage.update_params(params)

    @property
    def pages(self) -> DevicePages:
        """The page pool, whose cache the next step donates."""
        return self._stage.pages

    @property
    def slots(self) -> DeviceSlots:
        """The slots, whose state the next step donates."""
        return self._stage.slots

    def compiled_steps(self, variant: Variant = Variant.FULL) -> list[Any]:
        """Return the largest mixed step and decode loop, for measurements."""
        self._raise_if_closed()
        return self._programs.compiled_steps(self.params, self.pages.cache, variant)

    def resize(self, num_pages: int, moves: Moves) -> None:
        self._stop_preparing()
        super().resize(num_pages, moves)

    def close(self) -> None:
        self._stop_preparing()
        super().close()

    # ---- steps ----

    def _decode(self, plan: StepPlan, needs: SamplingNeeds) -> SubmittedStep:
        window, num_proposed = decode_window(self.config, plan, needs.variant)
        self.pages.cache, self.slots.state, outputs = self._programs.decode_loop(
            self._stage.arrays,
            self.pages.cache,
            self.slots.state,
            pack_window(window, plan.rows, plan.num_iterations, plan.verify_cost),
            self._programs.plan_loop(plan.rows, window, plan.num_iterations, num_proposed),
            self._programs.probe_params,
            self._programs.draft_loop(plan.rows, window, plan.num_iterations, num_proposed),
            variant=needs.variant,
            num_proposed=num_proposed,
        )
        output_rows = np.array([row.slot - window.start for row in plan.rows], np.int32)
        return SubmittedStep(plan, needs, outputs.tokens, (outputs,), output_rows)

    # ---- warm-up ----

    def _is_made(self, num_tokens: int) -> bool:
        return self._preparing is None or self._preparing.is_made(_body_name(num_tokens))

    def _executables(self) -> list[WarmupStep]:
        steps = self._warmup().steps()
        if self.config.has_encoder:
            for num_tokens in self.config.token_buckets:
                batch, _ = pack_rows(self.config, (), num_tokens)
                steps.append((f"encoder, {num_tokens} tokens", partial(self._encode, batch)))
        return steps

    def warm_up_behind(self, *, for_one: bool = False) -> bool:
        """Return False with an encoder, which is warmed up by running it."""
        if self.config.has_encoder:
            return False
        self._stop_preparing()
        if not for_one:
            self._preparing = self._warmup().behind(self._has_prepared)
        elif not self._programs.shelf.knows_first:  # else an earlier start's are being loaded
            steps = self._warmup().for_one_answer()
            self._preparing = Preparation(steps, num_first=len(steps))
        return True

    def is_ready(self) -> bool:
        return self._preparing is None or self._preparing.has_first()

    def finish_warmup(self) -> None:
        self._stop_preparing()
        super().finish_warmup()
        self._programs.shelf.end_start()

    def _warmup(self) -> DeviceWarmup:
        return DeviceWarmup(self.config, self._stage, takes_masks=self._takes_masks)

    def _has_prepared(self) -> None:
        """End a warm-up behind requests; another thread calls it, while steps run."""
        ModelExecutor.finish_warmup(self)
        self._programs.shelf.end_start()

    def _stop_preparing(self) -> None:
        if self._preparing is not None:
            self._preparing.close()
            self._preparing = None


@final
class DeviceWarmup:
    """Compiles every executable from shapes; without arrays, so that it can run during steps."""

    def __init__(self, config: EngineConfig, stage: DeviceStage, *, takes_masks: bool = False):
        slots, pages = stage.slots, stage.pages
        self._config = config
        self._programs = stage.programs
        self._params, self._cache, self._state = abstract((stage.arrays, pages.cache, slots.state))
        self._edits = [*slots.preparations(), *stage.states.preparations(pages)]
        self._generates = self._programs.model_config.generates
        self._takes_masks = takes_masks and self._generates
        self._edits_for_grammars = slots.preparations_for_grammars()
        self._copies = pages.preparations() if config.num_host_pages else ()
        self._incoming = pages.abstract_incoming(config.num_incoming_pages)

    def steps(self) -> list[WarmupStep]:
        """Return (name, function), in the order in which requests need them."""
        return [*self._first(), *self._later()]

    @property
    def num_first(self) -> int:
        """Number of leading `steps` that a single request needs."""
        return len(list(self._first()))

    def behind(self, on_end: Callable[[], None]) -> Preparation:
        """Compile the executables on other threads, in the order of `steps`, then call `on_end`."""
        first, delay_s = list(self._first()), _DELAY_S if self._programs.shelf.knows_first else 0.0
        return Preparation([*first, *self._later()], on_end, num_first=len(first), delay_s=delay_s)

    def for_one_answer(self) -> list[WarmupStep]:
        """Return what a greedy answer needs after its prompt and the first token.

        The executables of these two, of the prompt's own size, are made by their calls meanwhile.
        """
        return list(self._loops(Variant.GREEDY, _SMALLEST)) if self._generates else []

    def _first(self) -> Iterator[WarmupStep]:
        """Yield what a single request needs: a prompt of any length, a greedy or drawn answer."""
        num_tokens, *others = self._config.coarse_token_buckets
        yield self._body(num_tokens)
        if self._config.pooling == "labels":
            yield "logits of labels", self._labels
        yield from self._variant(Variant.GREEDY, _SMALLEST)
        yield from self._edits
        yield from map(self._body, others)
        yield from self._variant(Variant.RANDOM, _SMALLEST)

    def _later(self) -> Iterator[WarmupStep]:
        """Yield the rest: several sequences at once, then rare features."""
        tokens = self._config.coarse_token_buckets
        yield from (self._body(size) for size in self._config.token_buckets if size not in tokens)
        yield from self._variant(Variant.GREEDY, _LARGER)
        yield from self._copies
        if self._incoming is not None and self._config.num_host_pages:
            yield from map(self._body_with_pages, tokens)
        yield from self._variant(Variant.RANDOM, _LARGER)
        yield from self._variant(Variant.FULL, slice(None))
        if self._generates:
            yield from map(self._scores, tokens)
        if self._config.pooling == "mean":
            yield from map(self._means, tokens)
        if self._takes_masks:
            yield from self._edits_for_grammars
            yield from self._masked_heads()

    def _masked_heads(self) -> Iterator[WarmupStep]:
        for variant in Variant:
            for num_rows in head_sizes(self._config, variant, has_masks=True):
                name = f"{variant.name.lower()} sampling with masks, {num_rows} rows"
                yield name, partial(self._head, variant, num_rows, masked=True)
                if self._config.proposes_on_host and num_rows > 1:
                    yield f"{name}, of proposals", partial(self._verifying_head, variant, num_rows)

    def _variant(self, variant: Variant, part: slice) -> Iterator[WarmupStep]:
        """Yield a part of the sizes of a variant, in increasing order; none without tokens."""
        if not self._generates:
            return
        name = variant.name.lower()
        loop = partial(self._programs.prepare_loop, self._params, self._cache, self._state, variant)
        yield from self._loops(variant, part)
        for num_rows in variant.sizes(self._config.head_buckets)[part]:
            yield f"{name} sampling, {num_rows} rows", partial(self._head, variant, num_rows)
        for num_rows in loop_sizes(self._config, variant, speculates=True)[part]:
            step = partial(loop, num_rows, self._config.num_proposed_beside(num_rows))
            yield f"{name} speculating loop, {num_rows} slots", step

    def _loops(self, variant: Variant, part: slice) -> Iterator[WarmupStep]:
        loop = partial(self._programs.prepare_loop, self._params, self._cache, self._state, variant)
        for num_rows in variant.sizes(self._config.slot_buckets)[part]:
            name = f"{variant.name.lower()} decode loop, {num_rows} slots"
            yield name, partial(loop, num_rows)

    def _body(self, num_tokens: int) -> WarmupStep:
        return _body_name(num_tokens), partial(self._mixed, num_tokens, None)

    def _body_with_pages(self, num_tokens: int) -> WarmupStep:
        step = partial(self._mixed, num_tokens, self._incoming)
        return f"mixed step with pages, {num_tokens} tokens", step

    def _scores(self, num_tokens: int) -> WarmupStep:
        return f"scores of prompts, {num_tokens} tokens", partial(self._prompt_scores, num_tokens)

    def _means(self, num_tokens: int) -> WarmupStep:
        return f"means of prompts, {num_tokens} tokens", partial(self._pooled_rows, num_tokens)

    def _pooled_rows(self, num_tokens: int) -> None:
        batch, _ = pack_rows(self._config, (), num_tokens)
        hidden, _, _ = self._outputs(num_tokens)
        num_pooled = np.zeros(self._config.max_slots, np.int32)
        self._programs.pool_rows.prepare(hidden, batch, num_pooled)

    def _labels(self) -> None:
        _, row_hidden, _ = self._outputs(self._config.coarse_token_buckets[0])
        self._programs.score_labels.prepare(self._params, row_hidden)

    def _mixed(self, num_tokens: int, incoming: Any) -> jax.stages.Compiled:
        batch, _ = pack_rows(self._config, (), num_tokens)
        return self._programs.prepare_mixed(
            self._params, self._cache, self._state, batch, None, incoming
        )

    def _outputs(self, num_tokens: int) -> list[Any]:
        """Return the shapes of the body's outputs: hidden states, those of rows, tapped ones."""
        _, *outputs = self._mixed(num_tokens, None).out_info

        def placed(leaf: Any) -> jax.ShapeDtypeStruct:
            whole = self._programs.place.whole
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)

        return jax.tree.map(placed, outputs)

    def _prompt_scores(self, num_tokens: int) -> None:
        batch, _ = pack_rows(self._config, (), num_tokens)
        hidden, _, _ = self._outputs(num_tokens)
        self._programs.prompt_logprobs.prepare(self._params, self._state, hidden, batch)

    def _head(self, variant: Variant, num_rows: int, *, masked: bool = False) -> None:
        _, row_hidden, tapped = self._outputs(self._config.coarse_token_buckets[0])
        index = np.full(num_rows, self._config.max_slots, np.int32)
        vocab_size = self._programs.model_config.vocab_size
        masks = (no_masks(num_rows, vocab_size),) if masked else ()
        self._programs.mixed_head.prepare(
            self._params,
            self._state,
            row_hidden,
            index,
            tapped,
            self._programs.probe_params,
            *masks,
            variant=variant,
        )

    def _verifying_head(self, variant: Variant, num_rows: int) -> None:
        _, row_hidden, tapped = self._outputs(self._config.coarse_token_buckets[0])
        vocab_size = self._programs.model_config.vocab_size
        self._programs.verifying_head.prepare(
            self._params,
            self._state,
            row_hidden,
            pack_choosing(self._config, (), num_rows),
            tapped,
            self._programs.probe_params,
            no_masks(num_rows, vocab_size),
            variant=variant,
        )


def _body_name(num_tokens: int) -> str:
    return f"mixed step, {num_tokens} tokens"
