"""The executor that carries out plans on a JAX device or mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import jax
import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import RuntimeClosedError
from jaxserve.execution.compilations import CompilationCounter
from jaxserve.execution.device_slots import DeviceSlots
from jaxserve.execution.device_warmup import DeviceWarmup, made_bodies
from jaxserve.execution.encoding import encode_prompts
from jaxserve.execution.handle import DeviceHandle, PromptPart
from jaxserve.execution.mixed_heads import sampled, verified
from jaxserve.execution.page_calls import PAGES_A_CALL, num_incoming
from jaxserve.execution.page_copies import DevicePages
from jaxserve.execution.protocol import GroupRole
from jaxserve.execution.state_moves import StateMoves
from jaxserve.execution.swap_costs import (
    KeptSwapCosts,
    SwapCostMeter,
    measured_costs,
    work_of_a_position,
)
from jaxserve.execution.weights import fingerprint, fitted
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.memory.page_pool import NULL_PAGE
from jaxserve.memory.relocation import Moves, page_targets
from jaxserve.models.batch import KVCache
from jaxserve.models.incoming import IncomingPages
from jaxserve.scheduling.kv.swap_space import SwapCosts
from jaxserve.scheduling.plan import PageCopies, StepPlan
from jaxserve.steps.batches import MixedBatch
from jaxserve.steps.packing import (
    body_size,
    decode_window,
    in_places,
    pack_rows,
    pack_window,
    sampling_first,
)
from jaxserve.steps.preparation import Preparation
from jaxserve.steps.programs import Programs
from jaxserve.steps.sampling.variants import SamplingNeeds, Variant
from jaxserve.steps.step_function import abstract


@final
class DeviceExecutor:
    """An executor that owns the page cache and the slots on the device and borrows the parameters.

    Args:
      config: a configuration with the `num_pages` and `page_size` of the cache.
      programs: the executables for this cache.
      params: parameters of the programs' decoder.
      cache: a cache of zeros; the executor donates it to each step and keeps the step's result.
      strict: raise on any compilation after the warm-up.
      takes_masks: warm up what requests with a grammar need.
    """

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
        self.config = config
        self._takes_masks = takes_masks
        self._params = params
        self._swap_costs = SwapCostMeter(
            KeptSwapCosts(programs.shelf, config, cache),
            self._swap_timings,
            has_host_pages=config.num_host_pages > 0,
        )
        self.refinement = programs.refinement
        self.group: GroupRole | None = None
        self.num_device_groups = 1
        self.can_resize = True
        self.prepares_in_parallel = True
        self._pages = DevicePages(
            cache, programs.place.pages, self.config.num_host_pages, programs.shelf
        )
        self._slots = DeviceSlots(self.config, programs.place.whole, programs.shelf)
        self._states = StateMoves(self.config, programs.place.pages, programs.shelf)
        self._programs = programs
        self._compilations = CompilationCounter(strict=strict)
        self._is_closed = False
        self._preparing: Preparation | None = None
        # Cache sizes for which every executable is compiled.
        self._warm_num_pages: set[int] = set()

    @property
    def swap_costs(self) -> SwapCosts | None:
        """See `Executor`."""
        return self._swap_costs.costs

    @property
    def host_memory(self) -> HostMemory | None:
        """See `Executor`; this executor reads and writes the pages itself."""
        return self if self.config.num_host_pages else None

    @property
    def num_compilations(self) -> int:
        """See `ModelExecutor`."""
        return self._compilations.count

    def warmup_steps(self) -> list[tuple[str, Callable[[], Any]]]:
        """See `ModelExecutor`. The last step, which measures page swaps, runs steps."""
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
        """See `ModelExecutor`. An encoder is warmed up by running it, so that nothing is begun."""
        if self.config.has_encoder:
            return False
        self._stop_preparing()
        self._preparing = self._warmup().behind(self._has_prepared)
        return True

    def is_ready(self) -> bool:
        """See `ModelExecutor`."""
        return self._preparing is None or self._preparing.has_first()

    def finish_warmup(self) -> None:
        """See `ModelExecutor`."""
        self._stop_preparing()
        jax.block_until_ready((self._pages.cache, self._slots.state))
        self._has_prepared()

    def _warmup(self) -> DeviceWarmup:
        parts = (self.config, self._programs, self._params, self._slots, self._pages)
        return DeviceWarmup(*parts, self._states, takes_masks=self._takes_masks)

    def _has_prepared(self) -> None:
        self._warm_num_pages.add(self.config.num_pages)
        self._compilations.expect_none()
        self._programs.shelf.end_start()

    def _stop_preparing(self) -> None:
        if self._preparing is not None:
            self._preparing.close()
            self._preparing = None

    @property
    def is_warm(self) -> bool:
        """See `ModelExecutor`."""
        return self._compilations.is_warm

    def submit(self, plan: StepPlan) -> DeviceHandle:
        self._raise_if_closed()
        with self._compilations.watch(plan), self._programs.place.in_force():
            count = self.num_incoming(plan)
            late = plan.swaps_in[:count]
            self._pages.swap(plan.swaps_out, plan.swaps_in[count:])
            self._slots.apply(plan)
            self._states.apply(self._pages, plan.moves)
            needs = self._slots.needs(plan.rows)
            if plan.is_decode_loop:
                return self._decode(plan, needs)
            return self._mixed(plan, needs, late)

    def encode(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """See `ModelExecutor`."""
        self._raise_if_closed()
        return encode_prompts(self._programs, self._params, prompts)

    def fitted(self, params: Any, *, partial: bool = False) -> Any:
        """See `ModelExecutor`."""
        self._raise_if_closed()
        return fitted(params, self._params, partial=partial)

    def update_params(self, params: Any) -> None:
        """See `ModelExecutor`."""
        self._params = params

    def drop_params(self) -> None:
        """See `ModelExecutor`."""
        self._params = abstract(self._params)

    def has_arrived(self, host_page: int) -> bool:
        return self._pages.has_arrived(host_page)

    def read_host_page(self, host_page: int) -> bytes:
        """See `HostMemory`."""
        return self._pages.read_host_page(host_page)

    def write_host_page(self, host_page: int, contents: bytes) -> None:
        """See `HostMemory`."""
        self._pages.write_host_page(host_page, contents)

    def fingerprint(self) -> bytes:
        """See `HostMemory`."""
        page = self._pages.page_shape
        with self._programs.place.in_force():
            drafting = self._programs.draft_params
            more = () if drafting is None else (fingerprint(drafting),)
            return fingerprint(self._params, self._programs.computed_by, page, *more)

    @property
    def params(self) -> Any:
        """See `ModelExecutor`; None once closed."""
        return self._params

    @property
    def pages(self) -> DevicePages:
        """The page pool after the last submitted step; the next step donates its cache."""
        return self._pages

    @property
    def page_pools(self) -> tuple[DevicePages]:
        """See `LinkedExecutor`."""
        return (self._pages,)

    @property
    def slots(self) -> DeviceSlots:
        """The slots after the last submitted step; the next step donates their state."""
        return self._slots

    def compiled_steps(self, variant: Variant = Variant.FULL) -> list[Any]:
        """Return the largest mixed step and decode loop, for measurements."""
        self._raise_if_closed()
        return self._programs.compiled_steps(self._params, self._pages.cache, variant)

    def resize(self, num_pages: int, moves: Moves) -> None:
        """See `Executor`. A new size needs another warm-up."""
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
        """See `Executor`."""
        with self._programs.place.in_force():
            self._pages.renew()
            self._slots.renew()
        return True

    @property
    def num_buffers(self) -> int:
        """See `ModelExecutor`."""
        return self._pages.num_buffers

    @property
    def device(self) -> Any:
        """See `ModelExecutor`."""
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

    def _decode(self, plan: StepPlan, needs: SamplingNeeds) -> DeviceHandle:
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
        return DeviceHandle(plan, needs, outputs.tokens, (outputs,), output_rows)

    def num_incoming(self, plan: StepPlan) -> int:
        """See `page_calls.num_incoming`."""
        return num_incoming(self.config, plan)

    def _mixed(self, plan: StepPlan, needs: SamplingNeeds, late: PageCopies) -> DeviceHandle:
        if prompts := [row for row in plan.rows if row.encodes]:
            encoded = self._encode(pack_rows(self.config, prompts)[0])
            if len(prompts) == len(plan.rows) and not late:
                return DeviceHandle(plan, needs, encoded, (), np.empty(0, np.int32))
        computed = [i for i in sampling_first(plan.rows) if not plan.rows[i].encodes]
        order = [i for i in computed for _ in in_places(plan.rows[i])]
        rows = [part for i in computed for part in in_places(plan.rows[i])]
        made = made_bodies(self._preparing)
        num_tokens = body_size(self.config, rows, is_coarse=bool(late), is_made=made)
        batch, starts = pack_rows(self.config, rows, num_tokens)
        incoming = self._pages.incoming(late, self.config.num_incoming_pages) if late else None
        hidden, row_hidden, tapped = self._body(batch, incoming)
        prompt_parts = self._prompt_parts(plan, order, starts, batch, hidden)
        sampling = [i for i in computed if plan.rows[i].samples]
        if not sampling:
            return DeviceHandle(plan, needs, row_hidden, (), np.empty(0, np.int32), prompt_parts)
        choose = verified if plan.has_proposals else sampled
        self._slots.state, outputs = choose(
            *(self._programs, self._params, self._slots.state, plan, sampling),
            *((row_hidden, tapped), needs.variant),
        )
        output_rows = np.full(len(plan.rows), -1, np.int32)
        output_rows[sampling] = np.arange(len(sampling))
        return DeviceHandle(plan, needs, outputs.tokens, (outputs,), output_rows, prompt_parts)

    def _encode(self, batch: MixedBatch) -> jax.Array:
        """Encode whole prompts, write their keys and values, and return the encoder's output."""
        programs, params, slots = self._programs, self._params, self._slots.state
        encoded = programs.encode(params, programs.prompts_of(slots, batch))
        cache = programs.write_encoded(params, self._pages.cache, slots, batch, encoded)
        self._pages.cache = cache
        return encoded

    def _body(
        self, batch: MixedBatch, incoming: IncomingPages | None
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Run `steps.mixed_body` and replace the cache by its result."""
        self._pages.cache, *found = self._programs.mixed_body(
            *(self._params, self._pages.cache, self._slots.state, batch),
            *(self._programs.plan_mixed(batch), None, incoming, self._programs.draft_mixed(batch)),
        )
        return found[0], found[1], found[2]

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
        """See `Executor`. It times page swaps once more."""
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
            *(swap, prefill),
            num_pages=PAGES_A_CALL,
            num_tokens=num_tokens,
            position_work=work_of_a_position([self._programs.model_config], self._params),
        )
