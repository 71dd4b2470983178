"""Carries out plans on a JAX device or mesh."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import jax
import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import RuntimeClosedError
from jaxserve.execution.compilations import CompilationCounter
from jaxserve.execution.device_slots import DeviceSlots
from jaxserve.execution.handle import DeviceHandle, PromptPart
from jaxserve.execution.page_copies import PAGES_A_CALL, DevicePages
from jaxserve.execution.protocol import GroupRole
from jaxserve.execution.weights import fingerprint, fitted
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.memory.page_pool import NULL_PAGE
from jaxserve.memory.relocation import Moves, page_targets
from jaxserve.models.batch import KVCache
from jaxserve.models.coming import ComingPages
from jaxserve.scheduling.plan import Needs, PageCopies, StepPlan
from jaxserve.scheduling.supervisor import SwapCosts
from jaxserve.steps.functions import MixedBatch
from jaxserve.steps.packing import pack_needs, pack_rows, pack_sampling, sampling_first
from jaxserve.steps.programs import Programs

# Of what the choice between swapping and computing anew rests on.
_TIMINGS = 3


@final
class DeviceExecutor:
    """Owns the page cache and the slots on the device; borrows the parameters.

    Args:
      config: its `num_pages` and `page_size` are the cache's.
      programs: the executables for such a cache.
      params: of the programs' decoder.
      cache: all zeros; the executor donates it from step to step.
      strict: raise on any compilation after `warmup`.
    """

    def __init__(
        self,
        config: EngineConfig,
        programs: Programs,
        params: Any,
        cache: KVCache,
        *,
        strict: bool = False,
    ):
        self.config = config
        self._params = params
        self.swap_costs: SwapCosts | None = None
        self.refinement = programs.refinement
        self.group: GroupRole | None = None
        self.can_resize = True
        self._pages = DevicePages(cache, programs.place.pages, self.config.num_host_pages)
        self._slots = DeviceSlots(self.config, programs.place.whole)
        self._programs = programs
        self._compilations = CompilationCounter(strict=strict)
        self._is_closed = False
        # Sizes of the cache that every executable is there for.
        self._warm_num_pages: set[int] = set()

    @property
    def host_memory(self) -> HostMemory | None:
        """See `Executor`; this executor reads and writes the pages itself."""
        return self if self.config.num_host_pages else None

    @property
    def num_compilations(self) -> int:
        """See `ModelExecutor`."""
        return self._compilations.count

    def warmup_steps(self) -> list[tuple[str, Callable[[], None]]]:
        """See `ModelExecutor`."""
        config = self.config
        steps: list[tuple[str, Callable[[], None]]] = [("slot edits", self._slots.warm_up)]
        for num_tokens in reversed(config.token_buckets):
            steps.append((f"mixed step, {num_tokens} tokens", _bind(self._warm_body, num_tokens)))
            if config.num_host_pages and config.num_coming_pages:
                name = f"mixed step with pages, {num_tokens} tokens"
                steps.append((name, _bind(self._warm_coming, num_tokens)))
        for num_rows in reversed(config.head_buckets):
            steps.append((f"sampling, {num_rows} rows", _bind(self._warm_head, num_rows)))
        for num_rows in reversed(config.slot_buckets):
            steps.append((f"decode loop, {num_rows} slots", _bind(self._warm_decode, num_rows)))
        if config.num_host_pages:
            steps.append(("page swaps", self._measure_swaps))
        return [(name, self._in_force(step)) for name, step in steps]

    def finish_warmup(self) -> None:
        """See `ModelExecutor`."""
        jax.block_until_ready((self._pages.cache, self._slots.state))
        self._warm_num_pages.add(self.config.num_pages)
        self._compilations.is_warm = True

    @property
    def is_warm(self) -> bool:
        """See `ModelExecutor`."""
        return self._compilations.is_warm

    def submit(self, plan: StepPlan) -> DeviceHandle:
        self._raise_if_closed()
        with self._compilations.watch(plan), self._programs.place.in_force():
            count = self._num_coming(plan)
            late = plan.swaps_in[:count]
            self._pages.swap(plan.swaps_out, plan.swaps_in[count:])
            self._slots.apply(plan)
            return self._decode(plan) if plan.is_decode_loop else self._mixed(plan, late)

    def fitted(self, params: Any) -> Any:
        """See `ModelExecutor`."""
        self._raise_if_closed()
        return fitted(params, self._params)

    def update_params(self, params: Any) -> None:
        """See `ModelExecutor`."""
        self._params = params

    def read_host_page(self, host_page: int) -> bytes:
        """See `HostMemory`."""
        return self._pages.read_host_page(host_page)

    def write_host_page(self, host_page: int, contents: bytes) -> None:
        """See `HostMemory`."""
        self._pages.write_host_page(host_page, contents)

    def fingerprint(self) -> bytes:
        """See `HostMemory`."""
        leaf = jax.tree.leaves(self._pages.cache)[0]
        page = (leaf.shape[0], *leaf.shape[2:], str(leaf.dtype))
        with self._programs.place.in_force():
            return fingerprint(self._params, self._programs.model_config, page)

    @property
    def params(self) -> Any:
        """The parameters that the next step computes with; None once closed."""
        return self._params

    @property
    def pages(self) -> DevicePages:
        """The page pool as the last submitted step leaves it; the next step donates its cache."""
        return self._pages

    @property
    def slots(self) -> DeviceSlots:
        """The slots as the last submitted step leaves them; the next step donates their state."""
        return self._slots

    def compiled_steps(self) -> list[Any]:
        """The largest mixed step and decode loop as executables, to read what XLA made of them."""
        self._raise_if_closed()
        return self._programs.compiled_steps(self._params, self._pages.cache)

    def resize(self, num_pages: int, moves: Moves) -> None:
        """See `Executor`. A size that is new has to be compiled for, as at the start."""
        self._raise_if_closed()
        old_num_pages = self.config.num_pages
        with self._programs.place.in_force():
            self._pages.resize(num_pages, moves)
            self._slots.relocate(page_targets(old_num_pages, num_pages, moves))
        self.config = replace(self.config, num_pages=num_pages)
        self._compilations.is_warm = num_pages in self._warm_num_pages

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
            self._pages.delete()
            self._slots.delete()
            self._compilations.close()
        self._is_closed, self._params = True, None

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise RuntimeClosedError("the executor was closed; create a new runtime")

    # ---- steps ----

    def _decode(self, plan: StepPlan) -> DeviceHandle:
        self._pages.cache, self._slots.state, outputs = self._programs.decode_loop(
            self._params,
            self._pages.cache,
            self._slots.state,
            np.int32(plan.window_start),
            np.int32(plan.num_iterations),
            pack_needs(plan.needs),
            self._programs.plan_decode(
                plan.rows, plan.window_start, plan.window_size, plan.num_iterations
            ),
            self._programs.probe_params,
            num_rows=plan.window_size,
        )
        output_rows = np.array([row.slot - plan.window_start for row in plan.rows], np.int32)
        return DeviceHandle(plan, outputs.tokens, (outputs,), output_rows)

    def _num_coming(self, plan: StepPlan) -> int:
        """How many pages the step brings itself: more than one call before it would, or none."""
        if plan.is_decode_loop or len(plan.swaps_in) <= PAGES_A_CALL:
            return 0
        return min(self.config.num_coming_pages, len(plan.swaps_in))

    def _mixed(self, plan: StepPlan, late: PageCopies) -> DeviceHandle:
        order = sampling_first(plan.rows)
        rows = [plan.rows[i] for i in order]
        batch, starts = pack_rows(self.config, rows)
        hidden, row_hidden, tapped = self._body(batch, self._coming(late) if late else None)
        prompt_parts = self._prompt_parts(plan, order, starts, batch, hidden)
        num_sampling = sum(row.samples for row in rows)
        if num_sampling == 0:
            return DeviceHandle(plan, row_hidden, (), np.empty(0, np.int32), prompt_parts)
        self._slots.state, outputs = self._programs.mixed_head(
            self._params,
            self._slots.state,
            row_hidden,
            pack_sampling(self.config, rows),
            pack_needs(plan.needs),
            tapped,
            self._programs.probe_params,
        )
        output_rows = np.full(len(rows), -1, np.int32)
        output_rows[order[:num_sampling]] = np.arange(num_sampling)
        return DeviceHandle(plan, outputs.tokens, (outputs,), output_rows, prompt_parts)

    def _coming(self, copies: PageCopies) -> ComingPages:
        return self._pages.coming(copies, self.config.num_coming_pages)

    def _body(
        self, batch: MixedBatch, coming: ComingPages | None
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """See `steps.mixed_body`; the cache is in place."""
        self._pages.cache, *found = self._programs.mixed_body(
            *(self._params, self._pages.cache, self._slots.state, batch),
            *(self._programs.plan_mixed(batch), None, coming),
        )
        hidden, row_hidden, tapped = found
        return hidden, row_hidden, tapped

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
        spans = {
            i: slice(start, start + plan.rows[i].num_tokens)
            for i, start in zip(order, starts, strict=True)
            if plan.rows[i].wants_prompt_logprobs
        }
        return PromptPart(arrays, spans)

    # ---- warm-up ----

    def _in_force(self, step: Callable[[], None]) -> Callable[[], None]:
        def on_the_mesh() -> None:
            with self._programs.place.in_force():
                step()

        return on_the_mesh

    def _warm_body(self, num_tokens: int) -> None:
        batch, _ = pack_rows(self.config, (), num_tokens)
        hidden, _, _ = self._body(batch, None)
        self._programs.prompt_logprobs(self._params, self._slots.state, hidden, batch)

    def _warm_coming(self, num_tokens: int) -> None:
        batch, _ = pack_rows(self.config, (), num_tokens)
        self._body(batch, self._coming(()))

    def _warm_head(self, num_rows: int) -> None:
        batch, _ = pack_rows(self.config, ())
        _, row_hidden, tapped = self._body(batch, None)
        self._slots.state, _ = self._programs.mixed_head(
            self._params,
            self._slots.state,
            row_hidden,
            np.full(num_rows, self.config.max_slots, np.int32),
            pack_needs(Needs()),
            tapped,
            self._programs.probe_params,
        )

    def _warm_decode(self, num_rows: int) -> None:
        self._pages.cache, self._slots.state, _ = self._programs.decode_loop(
            self._params,
            self._pages.cache,
            self._slots.state,
            np.int32(0),
            np.int32(0),  # iterations: requests may be running
            pack_needs(Needs()),
            self._programs.plan_decode((), 0, num_rows),
            self._programs.probe_params,
            num_rows=num_rows,
        )

    def _measure_swaps(self) -> None:
        """Copy the null page to the host and back, and compute a prompt of nobody's.

        The least of a few timings, since whatever else the host does can only add to them.
        """

        def seconds(step: Callable[[], None]) -> float:
            step()  # compiles
            jax.block_until_ready(self._pages.cache)
            found = []
            for _ in range(_TIMINGS):
                begin_s = time.perf_counter()
                step()
                jax.block_until_ready(self._pages.cache)
                found.append(time.perf_counter() - begin_s)
            return min(found)

        to_nobody = self.config.num_host_pages
        out, back = ((NULL_PAGE, to_nobody),), ((to_nobody, NULL_PAGE),)
        swap_s = seconds(lambda: self._pages.swap(out * PAGES_A_CALL, back * PAGES_A_CALL))
        num_tokens = self.config.token_buckets[-1]
        prompt_s = seconds(lambda: self._warm_body(num_tokens))
        token_s = prompt_s / num_tokens
        self.swap_costs = SwapCosts(
            page_s=swap_s / 2 / PAGES_A_CALL,
            token_s=token_s,
            position_s=token_s * self._work_of_a_position(),
        )

    def _work_of_a_position(self) -> float:
        """Arithmetic of attending to one, as a share of what a token takes beside attention."""
        model = self._programs.model_config
        num_params = sum(leaf.size for leaf in jax.tree.leaves(self._params))
        attention = 2 * model.num_layers * model.num_heads * model.head_dim
        return attention / num_params


def _bind(function: Callable[[int], None], size: int) -> Callable[[], None]:
    return lambda: function(size)
