"""One stage of a stage plan on its devices, which computes its layers of each step."""

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
from jaxserve.steps.step_function import abstract


@final
@dataclass
class _Sampled:
    """Sampled tokens that are in transit to a stage.

    `index` int32 [R] holds slots; entries of `max_slots` are skipped.
    """

    index: np.ndarray
    token: jax.Array
    finite: jax.Array


@final
class DeviceStage:
    """A stage that owns its page cache and its copy of the slots and borrows the parameters.

    Every stage has a copy of all slots on its own devices: positions, page tables and which
    sequences have ended, a few integers per token. The tokens that the last stage samples are sent
    to the other stages. These append them only when they next compute the slot, so that work that
    was submitted earlier does not wait for the tokens.
    """

    def __init__(self, programs: Programs, params: Any, cache: KVCache):
        self.programs = programs
        self.params = params
        self.slots = DeviceSlots(programs.config, programs.place.whole, programs.shelf)
        self.pages = DevicePages(cache, programs.place.pages, shelf=programs.shelf)
        self._incoming: deque[_Sampled] = deque()

    def update_params(self, params: Any) -> None:
        """Replace the parameters of this stage for all later steps."""
        self.params = params

    def drop_params(self) -> None:
        """Keep only the shapes of the parameters, until the next update."""
        self.params = abstract(self.params)

    def edit(self, plan: StepPlan) -> None:
        """Apply the plan's edits to the slots. Call it before the plan's rows."""
        if plan.extensions:  # they follow tokens that may still be in transit
            self.catch_up()
        skip = self.programs.config.max_slots
        target = np.arange(skip + 1, dtype=np.int32)
        # Tokens in transit for a slot's previous sequence are dropped.
        taken = [*(a.slot for a in plan.admissions), *(to for _, to in plan.moves)]
        target[[*plan.releases, *taken]] = skip
        for origin, to in plan.moves:
            target[origin] = to
        for sampled in self._incoming:
            sampled.index = target[sampled.index]
        with self.programs.place.in_force():
            self.slots.apply(plan)

    def mixed(self, batch: MixedBatch, inputs: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Return this stage's output for every token, [T, E], and for every row, [S, E]."""
        slots: Any = batch.slot[: int((batch.query_length > 0).sum())]
        self._take_in(slots)
        with self.programs.place.in_force():
            self.pages.cache, hidden, row_hidden, _ = self.programs.mixed_body(
                *(self.params, self.pages.cache, self.slots.state, batch),
                self.programs.plan_mixed(batch),
                self._moved(inputs),
            )
        return hidden, row_hidden

    def encode(self, batch: MixedBatch) -> jax.Array:
        """Return the encoder's output for whole prompts, [T, E]. Only on the first stage."""
        programs = self.programs
        with programs.place.in_force():
            return programs.encode(self.params, programs.prompts_of(self.slots.state, batch))

    def write_encoded(self, batch: MixedBatch, encoded: jax.Array) -> None:
        """Write the keys and values of the encoder's output for this stage's layers."""
        with self.programs.place.in_force():
            self.pages.cache = self.programs.write_encoded(
                *(self.params, self.pages.cache, self.slots.state, batch, self._moved(encoded))
            )

    def decode(self, rows: Sequence[Row], window: range, inputs: jax.Array | None) -> jax.Array:
        """Return this stage's output for the newest tokens of a window's slots, [R, E].

        Args:
          rows: the slots of the window that take part, and their present positions.
        """
        self._take_in(np.array([row.slot for row in rows], np.int32))
        with self.programs.place.in_force():
            self.pages.cache, hidden = self.programs.stage_decode(
                self.params,
                self.pages.cache,
                self.slots.state,
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
        variant: Variant,
        masks: Any = None,
    ) -> tuple[Outputs, jax.Array, jax.Array]:
        """Sample with `steps.stage_head`. Call it on the last stage only.

        Args:
          masks: see `steps.packing.pack_masks`.

        Returns:
          The outputs, the tokens, and whether the logits of each token were finite.
        """
        with self.programs.place.in_force():
            self.slots.state, outputs, token, finite = self.programs.stage_head(
                *(self.params, self.slots.state, hidden, index, outputs),
                *(() if masks is None else (masks,)),
                variant=variant,
            )
        return outputs, token, finite

    def send(self, index: np.ndarray, token: jax.Array, finite: jax.Array) -> None:
        """Send this stage, not the last one, the tokens sampled for the slots at `index`."""
        token, finite = jax.device_put((token, finite), self.programs.place.whole)
        self._incoming.append(_Sampled(index, token, finite))

    def no_outputs(self, num_rows: int, most: int, variant: Variant) -> Outputs:
        with self.programs.place.in_force():
            return self.programs.no_outputs(num_rows, most, variant)

    def catch_up(self) -> None:
        """Append all tokens that are in transit."""
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
        """Keep every slot from advancing within the block."""
        self.catch_up()
        with self.programs.place.in_force(), self.slots.idle():
            yield
            self.catch_up()

    def delete(self) -> None:
        """Free the cache and the slots."""
        self._incoming.clear()
        self.pages.delete()
        self.slots.delete()

    def _take_in(self, slots: np.ndarray) -> None:
        """Append the tokens in transit for these slots, and all that were sent before them."""
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
