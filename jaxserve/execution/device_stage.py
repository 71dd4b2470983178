"""One stage of a stage plan on its devices: its layers' part of each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from jaxserve.execution.device_slots import DeviceSlots
from jaxserve.execution.page_copies import DevicePages
from jaxserve.memory.relocation import Moves, page_targets
from jaxserve.models.batch import KVCache
from jaxserve.scheduling.plan import Row, StepPlan
from jaxserve.steps.batches import MixedBatch
from jaxserve.steps.outputs import Outputs
from jaxserve.steps.packing import pack_window
from jaxserve.steps.programs import Programs
from jaxserve.steps.sampling.variants import Variant


@final
@dataclass
class _Sampled:
    """Tokens on their way to a stage. `index` int32 [R] are slots; `max_slots` is skipped."""

    index: np.ndarray
    token: jax.Array
    finite: jax.Array


@final
class DeviceStage:
    """Owns the stage's page cache and its copy of the slots; borrows the parameters.

    Every stage has a copy of all slots, a few integers a token: positions, pages and which
    sequences have ended are on its own devices. The tokens that the last stage samples are sent to
    the other stages, which append them when the slot is next computed, and not before, so that work
    that was submitted earlier does not wait for them.
    """

    def __init__(self, programs: Programs, params: Any, cache: KVCache):
        self.programs = programs
        self.params = params
        self.slots = DeviceSlots(programs.config, programs.place.whole)
        self.pages = DevicePages(cache, programs.place.pages)
        self._incoming: deque[_Sampled] = deque()

    def update_params(self, params: Any) -> None:
        """Compute from here on with other parameters of this stage."""
        self.params = params

    def edit(self, plan: StepPlan) -> None:
        """Edit the slots as the plan says, before its rows."""
        skip = self.programs.config.max_slots
        target = np.arange(skip + 1, dtype=np.int32)
        # Tokens on their way for a slot's former sequence are dropped.
        taken = [*(a.slot for a in plan.admissions), *(to for _, to in plan.moves)]
        target[[*plan.releases, *taken]] = skip
        for origin, to in plan.moves:
            target[origin] = to
        for sampled in self._incoming:
            sampled.index = target[sampled.index]
        with self.programs.place.in_force():
            self.slots.apply(plan)

    def mixed(self, batch: MixedBatch, inputs: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Return this stage's output for every token [T, E], and for every row [S, E]."""
        slots: Any = batch.slot[: int((batch.query_length > 0).sum())]
        self._take_in(slots)
        with self.programs.place.in_force():
            self.pages.cache, hidden, row_hidden, _ = self.programs.mixed_body(
                *(self.params, self.pages.cache, self.slots.state, batch),
                self.programs.plan_mixed(batch),
                self._moved(inputs),
            )
        return hidden, row_hidden

    def decode(self, rows: Sequence[Row], window: range, inputs: jax.Array | None) -> jax.Array:
        """Where the newest tokens of a window's slots end in this stage [R, E].

        Args:
          rows: the slots of the window that take part, and where they stand now.
        """
        self._take_in(np.array([row.slot for row in rows], np.int32))
        with self.programs.place.in_force():
            self.pages.cache, hidden = self.programs.stage_decode(
                self.params,
                self.pages.cache,
                self.slots.state,
                np.int32(window.start),
                pack_window(window, rows),
                self.programs.plan_decode(rows, window),
                self._moved(inputs),
            )
        return hidden

    def sample(
        self,
        hidden: jax.Array,
        index: np.ndarray,
        outputs: Outputs,
        iteration: int,
        variant: Variant,
    ) -> tuple[Outputs, jax.Array, jax.Array]:
        """On the last stage: sample (`steps.stage_head`).

        Returns:
          Outputs, tokens, and which of them are finite.
        """
        with self.programs.place.in_force():
            self.slots.state, outputs, token, finite = self.programs.stage_head(
                *(self.params, self.slots.state, hidden, index, outputs, np.int32(iteration)),
                variant=variant,
            )
        return outputs, token, finite

    def send(self, index: np.ndarray, token: jax.Array, finite: jax.Array) -> None:
        """On the other stages: send the tokens that were sampled for the slots at `index`."""
        token, finite = jax.device_put((token, finite), self.programs.place.whole)
        self._incoming.append(_Sampled(index, token, finite))

    def no_outputs(self, num_rows: int, num_iterations: int, variant: Variant) -> Outputs:
        with self.programs.place.in_force():
            return self.programs.no_outputs(num_rows, num_iterations, variant)

    def catch_up(self) -> None:
        """Append all tokens that were sent."""
        while self._incoming:
            self._append(self._incoming.popleft())

    def resize(self, num_pages: int, moves: Moves) -> None:
        """See `Executor.resize`."""
        old_num_pages = self.pages.num_pages
        with self.programs.place.in_force():
            self.pages.resize(num_pages, moves)
            self.slots.relocate(page_targets(old_num_pages, num_pages, moves))

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Let no slot advance for the length of the block."""
        self.catch_up()
        with self.programs.place.in_force(), self.slots.idle():
            yield
            self.catch_up()

    def delete(self) -> None:
        """Free cache and slots."""
        self._incoming.clear()
        self.pages.delete()
        self.slots.delete()

    def _take_in(self, slots: np.ndarray) -> None:
        """Append the tokens that were sent for these slots, and all that were sent before them."""
        last = max(
            (i for i, s in enumerate(self._incoming) if np.isin(s.index, slots).any()), default=-1
        )
        for _ in range(last + 1):
            self._append(self._incoming.popleft())

    def _append(self, sampled: _Sampled) -> None:
        with self.programs.place.in_force():
            self.slots.state = self.programs.stage_append(
                self.slots.state, sampled.index, sampled.token, sampled.finite
            )

    def _moved(self, inputs: jax.Array | None) -> jax.Array | None:
        return None if inputs is None else jax.device_put(inputs, self.programs.place.whole)
