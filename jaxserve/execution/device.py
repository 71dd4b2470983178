"""The executor that carries out plans on a JAX device or mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import jax
import numpy as np

from jaxserve.core.config import EngineConfig, bucket
from jaxserve.core.errors import RuntimeClosedError
from jaxserve.execution.device_slots import DeviceSlots, StateMoves
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
from jaxserve.execution.weights import fingerprint, fitted
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.memory.page_pool import NULL_PAGE, Moves, page_targets
from jaxserve.models.batch import IncomingPages, KVCache
from jaxserve.scheduling.kv.manager import SwapCosts
from jaxserve.scheduling.plan import PageCopies, StepPlan
from jaxserve.steps.outputs import Outputs
from jaxserve.steps.packing import (
    ChoosingRows,
    MixedBatch,
    body_size,
    decode_window,
    head_sizes,
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
from jaxserve.steps.preparation import Preparation
from jaxserve.steps.programs import Programs
from jaxserve.steps.sampling.sampler import SamplingNeeds, Variant
from jaxserve.steps.slots import SlotState
from jaxserve.steps.step_function import abstract

_Step = tuple[str, Callable[[], Any]]

# Seconds before executables are compiled behind requests, if the first ones that are needed were
# loaded early: a process that answers one prompt ends before.
_DELAY_S = 4.0

_SMALLEST, _LARGER = slice(1), slice(1, None)


@final
class DeviceExecutor(ModelExecutor):
    """An executor that owns the page cache and the slots on the device and borrows the parameters.

    It donates the cache to each step and keeps the step's result.
    """

    prepares_in_parallel = True

    def __init__(
        self,
        config: EngineConfig,
        programs: Programs,
        params: Any,
        cache: KVCache,
        *,
        strict: bool = False,
        takes_masks: bool = False,
    ):
        super().__init__(config, strict=strict)
        self._takes_masks = takes_masks
        self._params = params
        self._swap_costs = SwapCostMeter(
            KeptSwapCosts(programs.shelf, config, cache),
            self._swap_timings,
            has_host_pages=config.num_host_pages > 0,
        )
        self.refinement = programs.refinement
        self._pages = DevicePages(
            cache, programs.place.pages, self.config.num_host_pages, programs.shelf
        )
        self._slots = DeviceSlots(self.config, programs.place.whole, programs.shelf)
        self._states = StateMoves(self.config, programs.place.pages, programs.shelf)
        self._programs = programs
        self._is_closed = False
        self._preparing: Preparation | None = None

    @property
    def swap_costs(self) -> SwapCosts | None:
        return self._swap_costs.costs

    @property
    def host_memory(self) -> HostMemory | None:
        return self if self.config.num_host_pages else None

    def warmup_steps(self) -> list[tuple[str, Callable[[], Any]]]:
        """Return (name, function) of every executable; the last one measures page swaps."""
        steps = self._warmup().steps()
        if self.config.has_encoder:
            steps += [
                (f"encoder, {num_tokens} tokens", partial(self._warm_encoder, num_tokens))
                for num_tokens in self.config.token_buckets
            ]
        if self._swap_costs.is_missing:
            steps.append(("page swaps", self._swap_costs.measure))
        return steps

    def warm_up_behind(self) -> bool:
        """Return False with an encoder, which is warmed up by running it."""
        if self.config.has_encoder:
            return False
        self._stop_preparing()
        self._preparing = self._warmup().behind(self._has_prepared)
        return True

    def is_ready(self) -> bool:
        return self._preparing is None or self._preparing.has_first()

    def finish_warmup(self) -> None:
        self._stop_preparing()
        jax.block_until_ready((self._pages.cache, self._slots.state))
        self._has_prepared()

    def _warmup(self) -> DeviceWarmup:
        return DeviceWarmup(
            self.config,
            self._programs,
            self._params,
            self._slots,
            self._pages,
            self._states,
            takes_masks=self._takes_masks,
        )

    def _has_prepared(self) -> None:
        super().finish_warmup()
        self._programs.shelf.end_start()

    def _stop_preparing(self) -> None:
        if self._preparing is not None:
            self._preparing.close()
            self._preparing = None

    def submit(self, plan: StepPlan) -> SubmittedStep:
        self._raise_if_closed()
        with self._compilations.watch(plan), self._programs.place.in_force():
            count = num_incoming(self.config, plan)
            late = plan.swaps_in[:count]
            self._pages.swap(plan.swaps_out, plan.swaps_in[count:])
            self._slots.apply(plan)
            self._states.apply(self._pages, plan.moves)
            needs = self._slots.needs(plan.rows)
            if plan.is_decode_loop:
                return self._decode(plan, needs)
            return self._mixed(plan, needs, late)

    def encode(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        self._raise_if_closed()
        return encode_prompts(self._programs, self._params, prompts)

    def fitted(self, params: Any, *, partial: bool = False) -> Any:
        self._raise_if_closed()
        return fitted(params, self._params, partial=partial)

    def update_params(self, params: Any) -> None:
        self._params = params

    def drop_params(self) -> None:
        self._params = abstract(self._params)

    def has_arrived(self, host_page: int) -> bool:
        return self._pages.has_arrived(host_page)

    def read_host_page(self, host_page: int) -> bytes:
        return self._pages.read_host_page(host_page)

    def write_host_page(self, host_page: int, contents: bytes) -> None:
        self._pages.write_host_page(host_page, contents)

    def fingerprint(self) -> bytes:
        page = self._pages.page_shape
        with self._programs.place.in_force():
            drafting = self._programs.draft_params
            more = () if drafting is None else (fingerprint(drafting),)
            return fingerprint(self._params, self._programs.computed_by, page, *more)

    @property
    def params(self) -> Any:
        """The parameters of the next step; None once closed."""
        return self._params

    @property
    def pages(self) -> DevicePages:
        """The page pool, whose cache the next step donates."""
        return self._pages

    @property
    def page_pools(self) -> tuple[DevicePages]:
        return (self._pages,)

    @property
    def slots(self) -> DeviceSlots:
        """The slots, whose state the next step donates."""
        return self._slots

    def compiled_steps(self, variant: Variant = Variant.FULL) -> list[Any]:
        """Return the largest mixed step and decode loop, for measurements."""
        self._raise_if_closed()
        return self._programs.compiled_steps(self._params, self._pages.cache, variant)

    def resize(self, num_pages: int, moves: Moves) -> None:
        """Resize the pool; a new size needs another warm-up."""
        self._raise_if_closed()
        self._stop_preparing()
        self._swap_costs.restart()
        old_num_pages = self.config.num_pages
        with self._programs.place.in_force():
            self._pages.resize(num_pages, moves)
            self._slots.relocate(page_targets(old_num_pages, num_pages, moves))
        self.config = replace(self.config, num_pages=num_pages)
        self._compilations.expect_none(num_pages in self._warm_num_pages)

    def reset(self) -> bool:
        with self._programs.place.in_force():
            self._pages.renew()
            self._slots.renew()
        return True

    @property
    def num_buffers(self) -> int:
        return self._pages.num_buffers

    @property
    def device(self) -> Any:
        return next(iter(self._programs.place.whole.addressable_devices))

    def close(self) -> None:
        if not self._is_closed:
            self._stop_preparing()
            self._pages.delete()
            self._slots.delete()
            self._compilations.close()
        self._is_closed, self._params = True, None

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise RuntimeClosedError("the executor was closed; create a new runtime")

    # ---- steps ----

    def _decode(self, plan: StepPlan, needs: SamplingNeeds) -> SubmittedStep:
        window, num_proposed = decode_window(self.config, plan, needs.variant)
        self._pages.cache, self._slots.state, outputs = self._programs.decode_loop(
            self._params,
            self._pages.cache,
            self._slots.state,
            pack_window(window, plan.rows, plan.num_iterations, plan.verify_cost),
            self._programs.plan_loop(plan.rows, window, plan.num_iterations, num_proposed),
            self._programs.probe_params,
            self._programs.draft_loop(plan.rows, window, plan.num_iterations, num_proposed),
            variant=needs.variant,
            num_proposed=num_proposed,
        )
        output_rows = np.array([row.slot - window.start for row in plan.rows], np.int32)
        return SubmittedStep(plan, needs, outputs.tokens, (outputs,), output_rows)

    def _mixed(self, plan: StepPlan, needs: SamplingNeeds, late: PageCopies) -> SubmittedStep:
        if prompts := [row for row in plan.rows if row.encodes]:
            encoded = self._encode(pack_rows(self.config, prompts)[0])
            if len(prompts) == len(plan.rows) and not late:
                return SubmittedStep(plan, needs, encoded, (), np.empty(0, np.int32))
        computed = [i for i in sampling_first(plan.rows) if not plan.rows[i].encodes]
        order = [i for i in computed for _ in in_places(plan.rows[i])]
        rows = [part for i in computed for part in in_places(plan.rows[i])]
        made = made_bodies(self._preparing)
        num_tokens = body_size(self.config, rows, is_coarse=bool(late), is_made=made)
        batch, starts = pack_rows(self.config, rows, num_tokens)
        incoming = self._pages.incoming(late, self.config.num_incoming_pages) if late else None
        hidden, row_hidden, tapped = self._body(batch, incoming)
        prompt_parts = self._prompt_parts(plan, order, starts, batch, hidden)
        pool = partial(self._programs.pool, self._params, hidden, row_hidden, batch)
        pooled = PooledPart.of(list(zip(order, rows, strict=True)), pool)
        parts = () if pooled is None else (pooled,)
        sampling = [i for i in computed if plan.rows[i].samples]
        if not sampling:
            none = np.empty(0, np.int32)
            return SubmittedStep(plan, needs, row_hidden, (), none, prompt_parts, parts)
        choose = self._verify if plan.has_proposals else self._sample
        self._slots.state, outputs = choose(plan, sampling, row_hidden, tapped, needs.variant)
        output_rows = np.full(len(plan.rows), -1, np.int32)
        output_rows[sampling] = np.arange(len(sampling))
        return SubmittedStep(
            plan, needs, outputs.tokens, (outputs,), output_rows, prompt_parts, parts
        )

    def _encode(self, batch: MixedBatch) -> jax.Array:
        programs, params, slots = self._programs, self._params, self._slots.state
        encoded = programs.encode(params, programs.prompts_of(slots, batch))
        cache = programs.write_encoded(params, self._pages.cache, slots, batch, encoded)
        self._pages.cache = cache
        return encoded

    def _body(
        self, batch: MixedBatch, incoming: IncomingPages | None
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Run the body of a mixed step; return hidden states, those of rows, and tapped ones."""
        self._pages.cache, hidden, row_hidden, tapped = self._programs.mixed_body(
            self._params,
            self._pages.cache,
            self._slots.state,
            batch,
            self._programs.plan_mixed(batch),
            None,
            incoming,
            self._programs.draft_mixed(batch),
        )
        return hidden, row_hidden, tapped

    def _sample(
        self,
        plan: StepPlan,
        sampling: Sequence[int],
        row_hidden: jax.Array,
        tapped: jax.Array | None,
        variant: Variant,
    ) -> tuple[SlotState, Outputs]:
        """Choose a token for the plan's rows `sampling`, which come first in the batch."""
        has_masks = plan.masks is not None
        rows = [plan.rows[i] for i in sampling]
        index = sampling_slots(self._programs.config, rows, variant, has_masks=has_masks)
        # The device computes the body while the masks are still being computed.
        masks = pack_masks(plan, sampling, len(index))
        with_masks = () if masks is None else (masks,)
        return self._programs.mixed_head(
            self._params,
            self._slots.state,
            row_hidden,
            index,
            tapped,
            self._programs.probe_params,
            *with_masks,
            variant=variant,
        )

    def _verify(
        self,
        plan: StepPlan,
        sampling: Sequence[int],
        row_hidden: jax.Array,
        tapped: jax.Array | None,
        variant: Variant,
    ) -> tuple[SlotState, Outputs]:
        """Choose tokens for rows of which some have proposals and may get several tokens."""
        choosing, masks = verifying_arguments(
            self._programs, plan, sampling, variant, has_masks=True
        )
        return self._programs.verifying_head(
            self._params,
            self._slots.state,
            row_hidden,
            choosing,
            tapped,
            self._programs.probe_params,
            masks,
            variant=variant,
        )

    def _prompt_parts(
        self,
        plan: StepPlan,
        order: Sequence[int],
        starts: Sequence[int],
        batch: MixedBatch,
        hidden: jax.Array,
    ) -> PromptPart | None:
        if not any(row.wants_prompt_logprobs for row in plan.rows):
            return None
        arrays = self._programs.prompt_logprobs(self._params, self._slots.state, hidden, batch)
        return PromptPart.of(arrays, [(i, plan.rows[i]) for i in order], starts)

    def _warm_encoder(self, num_tokens: int) -> None:
        with self._programs.place.in_force():
            self._encode(pack_rows(self.config, (), num_tokens)[0])

    def use_idle_time(self) -> bool:
        """Do the next timing of page swaps."""
        if not (self._swap_costs.is_missing and self.is_warm):
            return False
        with self._programs.place.in_force():
            self._swap_costs.measure_on()
        return True

    def _swap_timings(self) -> Iterator[SwapCosts | None]:
        """Time copies of the null page and the prefill of an empty prompt."""
        unused_page = self.config.num_host_pages
        out, back = ((NULL_PAGE, unused_page),), ((unused_page, NULL_PAGE),)
        num_tokens = self.config.token_buckets[-1]

        def swap() -> None:
            self._pages.swap(out * PAGES_A_CALL, back * PAGES_A_CALL)
            jax.block_until_ready(self._pages.cache)

        def prefill() -> None:
            if self.config.has_encoder:
                self._warm_encoder(num_tokens)
            else:
                self._body(pack_rows(self.config, (), num_tokens)[0], None)
            jax.block_until_ready(self._pages.cache)

        return measured_costs(
            swap,
            prefill,
            num_pages=PAGES_A_CALL,
            num_tokens=num_tokens,
            position_work=work_of_a_position([self._programs.model_config], self._params),
        )


def verifying_arguments(
    programs: Programs,
    plan: StepPlan,
    sampling: Sequence[int],
    variant: Variant,
    *,
    has_masks: bool,
) -> tuple[ChoosingRows, Any]:
    """Wait for the masks; return the rows of a verifying head, and the masks."""
    config = programs.config
    order = [i for i in sampling for _ in in_places(plan.rows[i])]
    num_rows = bucket(len(order), head_sizes(config, variant, has_masks=has_masks))
    masks = pack_masks(plan, order, num_rows)
    if masks is None:
        masks = no_masks(num_rows, programs.model_config.vocab_size)
    return pack_choosing(config, [plan.rows[i] for i in sampling], num_rows), masks


@final
class DeviceWarmup:
    """Compiles every executable from shapes; without arrays, so that it can run during steps."""

    def __init__(
        self,
        config: EngineConfig,
        programs: Programs,
        params: Any,
        slots: DeviceSlots,
        pages: DevicePages,
        states: StateMoves,
        *,
        takes_masks: bool = False,
    ):
        self._config = config
        self._programs = programs
        self._params, self._cache, self._state = abstract((params, pages.cache, slots.state))
        self._edits = slots.preparations() + states.preparations(pages)
        self._generates = programs.model_config.generates
        self._takes_masks = takes_masks and self._generates
        self._edits_for_grammars = slots.preparations_for_grammars()
        self._copies = pages.preparations() if config.num_host_pages else ()
        self._incoming = pages.abstract_incoming(config.num_incoming_pages)

    def steps(self) -> list[_Step]:
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

    def _first(self) -> Iterator[_Step]:
        """Yield what a single request needs: a prompt of any length, a greedy or drawn answer."""
        num_tokens, *others = self._config.coarse_token_buckets
        yield self._body(num_tokens)
        if self._config.pooling == "labels":
            yield "logits of labels", self._labels
        yield from self._variant(Variant.GREEDY, _SMALLEST)
        yield from self._edits
        yield from map(self._body, others)
        yield from self._variant(Variant.RANDOM, _SMALLEST)

    def _later(self) -> Iterator[_Step]:
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

    def _masked_heads(self) -> Iterator[_Step]:
        for variant in Variant:
            for num_rows in head_sizes(self._config, variant, has_masks=True):
                name = f"{variant.name.lower()} sampling with masks, {num_rows} rows"
                yield name, partial(self._head, variant, num_rows, masked=True)
                if self._config.num_proposed and num_rows > 1:
                    yield f"{name}, of proposals", partial(self._verifying_head, variant, num_rows)

    def _variant(self, variant: Variant, part: slice) -> Iterator[_Step]:
        """Yield a part of the sizes of a variant, in increasing order; none without tokens."""
        if not self._generates:
            return
        name = variant.name.lower()
        for num_rows in variant.sizes(self._config.slot_buckets)[part]:
            yield (
                f"{name} decode loop, {num_rows} slots",
                partial(self._decode, variant, num_rows, 0),
            )
        for num_rows in variant.sizes(self._config.head_buckets)[part]:
            yield f"{name} sampling, {num_rows} rows", partial(self._head, variant, num_rows)
        for num_rows in loop_sizes(self._config, variant, speculates=True)[part]:
            num_proposed = self._config.num_proposed_beside(num_rows)
            loop = partial(self._decode, variant, num_rows, num_proposed)
            yield f"{name} speculating loop, {num_rows} slots", loop

    def _body(self, num_tokens: int) -> _Step:
        return _body_name(num_tokens), partial(self._mixed, num_tokens, None)

    def _body_with_pages(self, num_tokens: int) -> _Step:
        step = partial(self._mixed, num_tokens, self._incoming)
        return f"mixed step with pages, {num_tokens} tokens", step

    def _scores(self, num_tokens: int) -> _Step:
        return f"scores of prompts, {num_tokens} tokens", partial(self._prompt_scores, num_tokens)

    def _means(self, num_tokens: int) -> _Step:
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
        return self._programs.mixed_body.prepare(
            self._params,
            self._cache,
            self._state,
            batch,
            self._programs.plan_mixed(batch),
            None,
            incoming,
            abstract(self._programs.draft_mixed(batch)),
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

    def _decode(self, variant: Variant, num_rows: int, num_proposed: int) -> None:
        window = range(num_rows)
        self._programs.decode_loop.prepare(
            self._params,
            self._cache,
            self._state,
            pack_window(window, ()),
            self._programs.plan_loop((), window, num_proposed=num_proposed),
            self._programs.probe_params,
            abstract(self._programs.draft_loop((), window, num_proposed=num_proposed)),
            variant=variant,
            num_proposed=num_proposed,
        )


def made_bodies(preparing: Preparation | None) -> Callable[[int], bool] | None:
    """Return a predicate of the sizes of mixed steps that exist; None without a preparation."""
    if preparing is None:
        return None
    return lambda num_tokens: preparing.is_made(_body_name(num_tokens))


def _body_name(num_tokens: int) -> str:
    return f"mixed step, {num_tokens} tokens"
