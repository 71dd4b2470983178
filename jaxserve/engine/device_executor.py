"""Carries out plans on a JAX device or mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar, final

import jax
import numpy as np

from jaxserve.core.config import bucket
from jaxserve.core.errors import CompilationAfterWarmupError, RuntimeClosedError
from jaxserve.engine.compilations import CompilationCounter
from jaxserve.engine.device_handle import DeviceHandle, PromptPart
from jaxserve.engine.programs import MixedBatch, Programs
from jaxserve.engine.sampler import SamplingNeeds
from jaxserve.engine.slots import (
    ADMISSIONS_A_CALL,
    PAGE_UPDATES_A_CALL,
    empty_slots,
    pack_admissions,
)
from jaxserve.memory.relocation import Moves, page_sources, page_targets
from jaxserve.models.batch import KVCache
from jaxserve.scheduling.plan import Needs, Row, StepPlan

_Item = TypeVar("_Item")


@final
class DeviceExecutor:
    """Owns the page cache and the slots on the device; borrows the parameters.

    Args:
      programs: the executables; their config's `num_pages` and `page_size` must be the cache's.
      params: of the programs' decoder.
      cache: all zeros; the executor donates it from step to step.
      strict: raise on any compilation after `warmup`.
    """

    def __init__(
        self,
        programs: Programs,
        params: Any,
        cache: KVCache,
        *,
        strict: bool = False,
    ):
        self.config = programs.config
        self._params = params
        self._cache: KVCache | None = cache
        self._slots = jax.device_put(empty_slots(self.config), programs.place.whole)
        self._programs = programs
        self._compilations = CompilationCounter()
        self._strict = strict
        # Sizes of the cache that every executable is there for.
        self._warm_num_pages: set[int] = set()

    @property
    def num_compilations(self) -> int:
        """Executables compiled (or read from the persistent cache) by `submit`."""
        return self._compilations.count

    def warmup_steps(self) -> list[tuple[str, Callable[[], None]]]:
        """(name, function) of every executable; running a function compiles it, harmlessly.

        No slot advances, and nothing but the null page is written. Call `finish_warmup` last.
        """
        config = self.config
        steps: list[tuple[str, Callable[[], None]]] = [("slot edits", self._warm_edits)]
        for num_tokens in reversed(config.token_buckets):
            steps.append((f"mixed step, {num_tokens} tokens", _bind(self._warm_body, num_tokens)))
        for num_rows in reversed(config.head_buckets):
            steps.append((f"sampling, {num_rows} rows", _bind(self._warm_head, num_rows)))
        for num_rows in reversed(config.slot_buckets):
            steps.append((f"decode loop, {num_rows} slots", _bind(self._warm_decode, num_rows)))
        return [(name, self._in_force(step)) for name, step in steps]

    def finish_warmup(self) -> None:
        """From here on a compilation is a stall (and in strict mode an error)."""
        jax.block_until_ready((self._cache, self._slots))
        self._warm_num_pages.add(self.config.num_pages)

    @property
    def is_warm(self) -> bool:
        """Whether everything was compiled for a cache of this size."""
        return self.config.num_pages in self._warm_num_pages

    def submit(self, plan: StepPlan) -> DeviceHandle:
        if self._cache is None:
            raise RuntimeClosedError("the executor was closed; create a new runtime")
        before = self._compilations.count
        with self._compilations.watch(), self._programs.place.in_force():
            self._edit_slots(plan)
            handle = self._decode(plan) if plan.is_decode_loop else self._mixed(plan)
        if self._strict and self.is_warm and self._compilations.count > before:
            raise CompilationAfterWarmupError(
                f"step {plan.index} ({len(plan.rows)} rows, {plan.num_tokens} tokens) compiled "
                f"{self._compilations.count - before} executables after warm-up; report this as a "
                "bug, or serve without strict=True"
            )
        return handle

    def update_params(self, params: Any) -> None:
        """Compute from here on with other parameters of the same shapes and shardings."""
        self._params = params

    @property
    def params(self) -> Any:
        """What is computed with. Raises RuntimeClosedError once it was closed."""
        if self._cache is None:
            raise RuntimeClosedError("the executor was closed; create a new runtime")
        return self._params

    def resize(self, num_pages: int, moves: Moves) -> None:
        """See `Executor`. A size that is new has to be compiled for, as at the start.

        One buffer after the other is copied and deleted: at the peak there is, beside the larger
        of the two caches, one buffer of the smaller. That is the keys of one layer where layers
        have buffers of their own, and half that cache where all layers share two.
        """
        if self._cache is None or self._slots is None:
            raise RuntimeClosedError("the executor was closed; create a new runtime")
        old_num_pages = self.config.num_pages
        with self._programs.place.in_force():
            try:
                self._copy_pages(num_pages, moves)
            except Exception:
                self._copy_pages(old_num_pages, [(new, old) for old, new in moves])
                raise
        targets = page_targets(old_num_pages, num_pages, moves)
        tables = jax.device_put(
            targets[np.asarray(self._slots.page_table)], self._programs.place.whole
        )
        self._slots = replace(self._slots, page_table=tables)
        self.config = replace(self.config, num_pages=num_pages)

    @property
    def num_buffers(self) -> int:
        """Of equal size, that the cache consists of."""
        return len(jax.tree.leaves(self._cache))

    def close(self) -> None:
        if self._cache is not None:
            for leaf in jax.tree.leaves((self._cache, self._slots)):
                leaf.delete()
            self._compilations.close()
        self._cache = self._params = self._slots = None

    # ---- slots ----

    def _edit_slots(self, plan: StepPlan) -> None:
        releases = plan.releases
        if plan.moves or plan.admissions:  # page updates belong to what comes after these
            if releases:
                self._edit(releases, ())
                releases = ()
            if plan.moves:
                self._move(plan.moves)
            for some in _chunks(plan.admissions, ADMISSIONS_A_CALL):
                index, rows = pack_admissions(self.config, some)
                self._slots = self._programs.admit(self._slots, index, rows)
        for updates in _chunks(plan.page_updates, PAGE_UPDATES_A_CALL):
            self._edit(releases, updates)
            releases = ()
        if releases:
            self._edit(releases, ())

    def _edit(self, releases: Sequence[int], updates: Sequence[tuple[int, int, int]]) -> None:
        released = np.zeros(self.config.max_slots, np.bool_)
        released[list(releases)] = True
        entries = np.full((PAGE_UPDATES_A_CALL, 3), self.config.max_slots, np.int32)
        if updates:
            entries[: len(updates)] = updates
        self._slots = self._programs.edit(self._slots, released, entries)

    def _move(self, moves: Sequence[tuple[int, int]]) -> None:
        source = np.arange(self.config.max_slots, dtype=np.int32)
        vacated = np.zeros(self.config.max_slots, np.bool_)
        for start, target in moves:
            source[target] = start
            vacated[start] = True
        self._slots = self._programs.move(self._slots, source, vacated)

    # ---- pages ----

    def _copy_pages(self, num_pages: int, moves: Moves) -> None:
        """Bring every buffer that has another size to `num_pages`."""
        assert self._cache is not None
        buffers = [*self._cache.k_pages, *self._cache.v_pages]
        num_layers = len(self._cache.k_pages)
        try:
            for i, old in enumerate(buffers):
                if old.shape[1] != num_pages:
                    source = page_sources(old.shape[1], num_pages, moves)
                    buffers[i] = jax.block_until_ready(self._programs.copy_pages(old, source))
                    old.delete()
        finally:
            self._cache = KVCache(tuple(buffers[:num_layers]), tuple(buffers[num_layers:]))

    # ---- steps ----

    def _decode(self, plan: StepPlan) -> DeviceHandle:
        self._cache, self._slots, outputs = self._programs.decode_loop(
            self._params,
            self._cache,
            self._slots,
            np.int32(plan.window_start),
            np.int32(plan.num_iterations),
            _needs(plan.needs),
            num_rows=plan.window_size,
        )
        output_rows = np.array([row.slot - plan.window_start for row in plan.rows], np.int32)
        return DeviceHandle(plan, outputs.tokens, outputs, output_rows)

    def _mixed(self, plan: StepPlan) -> DeviceHandle:
        order = sorted(range(len(plan.rows)), key=lambda i: not plan.rows[i].samples)
        rows = [plan.rows[i] for i in order]
        batch, starts = self._pack_rows(rows)
        self._cache, hidden, row_hidden = self._programs.mixed_body(
            self._params, self._cache, self._slots, batch
        )
        prompt_parts = self._prompt_parts(plan, order, starts, batch, hidden)
        num_sampling = sum(row.samples for row in rows)
        if num_sampling == 0:
            return DeviceHandle(plan, row_hidden, None, np.empty(0, np.int32), prompt_parts)
        self._slots, outputs = self._programs.mixed_head(
            self._params,
            self._slots,
            row_hidden,
            batch.slot,
            batch.num_sampling,
            _needs(plan.needs),
            num_rows=bucket(num_sampling, self.config.head_buckets),
        )
        output_rows = np.full(len(rows), -1, np.int32)
        output_rows[order[:num_sampling]] = np.arange(num_sampling)
        return DeviceHandle(plan, outputs.tokens, outputs, output_rows, prompt_parts)

    def _pack_rows(self, rows: Sequence[Row]) -> tuple[MixedBatch, list[int]]:
        num_slots = self.config.max_slots
        size = bucket(max(1, sum(row.num_tokens for row in rows)), self.config.token_buckets)
        token_row = np.full(size, num_slots, np.int32)
        slot, start, query_start, length = np.zeros((4, num_slots), np.int32)
        used = 0
        starts = []
        for i, row in enumerate(rows):
            token_row[used : used + row.num_tokens] = i
            slot[i], start[i], query_start[i], length[i] = row.slot, row.start, used, row.num_tokens
            starts.append(used)
            used += row.num_tokens
        num_sampling = np.int32(sum(row.samples for row in rows))
        # NumPy in place of the device arrays that jit makes of them.
        batch: Any = MixedBatch(token_row, slot, start, query_start, length, num_sampling)  # pyright: ignore[reportArgumentType]
        return batch, starts

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
        arrays = self._programs.prompt_logprobs(self._params, self._slots, hidden, batch)
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

    def _warm_edits(self) -> None:
        num_slots = self.config.max_slots
        self._edit((), ())
        self._slots = self._programs.move(
            self._slots, np.arange(num_slots, dtype=np.int32), np.zeros(num_slots, np.bool_)
        )
        index, rows = pack_admissions(self.config, ())
        self._slots = self._programs.admit(self._slots, index, rows)

    def _warm_body(self, num_tokens: int) -> None:
        batch = self._idle_batch(num_tokens)
        self._cache, hidden, _ = self._programs.mixed_body(
            self._params, self._cache, self._slots, batch
        )
        self._programs.prompt_logprobs(self._params, self._slots, hidden, batch)

    def _warm_head(self, num_rows: int) -> None:
        batch = self._idle_batch(self.config.token_buckets[0])
        self._cache, _, row_hidden = self._programs.mixed_body(
            self._params, self._cache, self._slots, batch
        )
        self._slots, _ = self._programs.mixed_head(
            self._params,
            self._slots,
            row_hidden,
            batch.slot,
            batch.num_sampling,
            _needs(Needs()),
            num_rows=num_rows,
        )

    def _warm_decode(self, num_rows: int) -> None:
        self._cache, self._slots, _ = self._programs.decode_loop(
            self._params,
            self._cache,
            self._slots,
            np.int32(0),
            np.int32(0),
            _needs(Needs()),
            num_rows=num_rows,
        )

    def _idle_batch(self, num_tokens: int) -> MixedBatch:
        batch, _ = self._pack_rows(())
        token_row: Any = np.full(num_tokens, self.config.max_slots, np.int32)
        return MixedBatch(
            token_row,
            batch.slot,
            batch.start,
            batch.query_start,
            batch.query_length,
            batch.num_sampling,
        )


def _needs(needs: Needs) -> SamplingNeeds:
    flags: dict[str, Any] = {name: np.bool_(value) for name, value in vars(needs).items()}
    return SamplingNeeds(**flags)


def _chunks(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _bind(function: Callable[[int], None], size: int) -> Callable[[], None]:
    return lambda: function(size)
