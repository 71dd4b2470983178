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
from jaxserve.execution.pages import DevicePages
from jaxserve.execution.weights import fingerprint
from jaxserve.memory.page_pool import Moves, page_targets
from jaxserve.models.batch import IncomingPages, KVCache
from jaxserve.scheduling.plan import PageCopies, Row, StepPlan
from jaxserve.steps.heads import Chosen
from jaxserve.steps.outputs import Outputs
from jaxserve.steps.packing import ChoosingRows, DecodeWindow, MixedBatch, pack_window
from jaxserve.steps.programs import Programs
from jaxserve.steps.proposals import Draft
from jaxserve.steps.sampling.sampler import Variant
from jaxserve.steps.stages import Proposed
from jaxserve.steps.step_function import abstract


@final
@dataclass
class _Sampled:
    """Sampled tokens in transit to the slots at `index`, int32 [R].

    Entries of `max_slots` are skipped. The tokens replace `num_proposed` newest tokens of each
    slot, int32 [R]; None replaces none.
    """

    index: np.ndarray
    chosen: Chosen
    num_proposed: np.ndarray | None


@final
class DeviceStage:
    """A stage that owns its page cache and its copy of the slots and borrows the parameters.

    Every stage has a copy of all slots on its own devices: positions, page tables and which
    sequences have ended, a few integers per token. The last stage, which `samples` and looks up
    proposals, sends its tokens to the other stages, which append them only when they next compute
    the slot. Work that was submitted earlier therefore does not wait for the tokens. All stages
    have the same `num_host_pages`.
    """

    def __init__(
        self,
        programs: Programs,
        params: Any,
        cache: KVCache,
        num_host_pages: int = 0,
        *,
        samples: bool,
    ):
        self.programs = programs
        self.params = params
        self.slots = DeviceSlots(
            programs.config, programs.place.whole, programs.shelf, looks_up=samples
        )
        self.pages = DevicePages(cache, programs.place.pages, num_host_pages, programs.shelf)
        self._incoming: deque[_Sampled] = deque()

    def update_params(self, params: Any) -> None:
        self.params = params

    def drop_params(self) -> None:
        """Keep only the shapes of the parameters, until the next update."""
        self.params = abstract(self.params)

    def swap(self, out: PageCopies, back: PageCopies) -> None:
        """Copy pages to and from the host, before the plan's edits and rows."""
        with self.programs.place.in_force():
            self.pages.swap(out, back)

    def incoming(self, back: PageCopies) -> IncomingPages:
        return self.pages.incoming(back, self.programs.config.num_incoming_pages)

    def edit(self, plan: StepPlan) -> None:
        """Apply the plan's edits to the slots. Call it before the plan's rows."""
        if plan.extensions or plan.has_proposals:  # they follow tokens that may be in transit
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
        self._incoming = deque(each for each in self._incoming if (each.index < skip).any())
        with self.programs.place.in_force():
            self.slots.apply(plan)

    def mixed(
        self, batch: MixedBatch, inputs: jax.Array | None, incoming: IncomingPages | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return this stage's output for every token, [T, E], and for every row, [S, E]."""
        slots: Any = batch.slot[: int((batch.query_length > 0).sum())]
        self._take_in(slots)
        with self.programs.place.in_force():
            self.pages.cache, hidden, row_hidden, _ = self.programs.mixed_body(
                self.params,
                self.pages.cache,
                self.slots.state,
                batch,
                self.programs.plan_mixed(batch),
                self._moved(inputs),
                incoming,
            )
        return hidden, row_hidden

    def encode(self, batch: MixedBatch) -> jax.Array:
        """Return the encoder's output for whole prompts, [T, E]. Only on the first stage."""
        programs = self.programs
        with programs.place.in_force():
            return programs.encode(self.params, programs.prompts_of(self.slots.state, batch))

    def write_encoded(self, batch: MixedBatch, encoded: jax.Array) -> None:
        with self.programs.place.in_force():
            self.pages.cache = self.programs.write_encoded(
                self.params, self.pages.cache, self.slots.state, batch, self._moved(encoded)
            )

    def decode(
        self,
        rows: Sequence[Row],
        window: range,
        inputs: jax.Array | None,
        iteration: int = 0,
        proposed: Proposed | None = None,
    ) -> jax.Array:
        """Return this stage's output for the newest tokens of a window's slots, [R, E].

        `rows` have the positions before the loop, and `iteration` counts the loop's earlier
        iterations. With the last stage's proposals the output has R + proposals rows.
        """
        self._take_in(np.array([row.slot for row in rows], np.int32))
        num_proposed = 0
        if proposed is not None:
            num_proposed = proposed.tokens.shape[1]
            proposed = jax.device_put(proposed, self.programs.place.whole)
        with self.programs.place.in_force():
            self.pages.cache, hidden = self.programs.stage.decode(
                self.params,
                self.pages.cache,
                self.slots.state,
                pack_window(window, rows),
                self.programs.plan_decode(rows, window, iteration, num_proposed),
                self._moved(inputs),
                proposed,
            )
        return hidden

    def sample(
        self,
        hidden: jax.Array,
        index: np.ndarray,
        outputs: Outputs,
        variant: Variant,
        masks: Any = None,
    ) -> tuple[Outputs, Chosen]:
        """Sample on the last stage, which alone may also `propose`, `choose` and `verify`."""
        with_masks = () if masks is None else (masks,)
        with self.programs.place.in_force():
            self.slots.state, outputs, chosen = self.programs.stage.head(
                self.params,
                self.slots.state,
                hidden,
                index,
                outputs,
                *with_masks,
                variant=variant,
            )
        return outputs, chosen

    def verify(
        self, hidden: jax.Array, rows: ChoosingRows, masks: Any, variant: Variant
    ) -> tuple[Outputs, Chosen]:
        with self.programs.place.in_force():
            self.slots.state, outputs, chosen = self.programs.stage.verify(
                self.params, self.slots.state, hidden, rows, masks, variant=variant
            )
        return outputs, chosen

    def propose(
        self, window: DecodeWindow, num_tokens: jax.Array, num_proposed: int
    ) -> tuple[Draft, Proposed]:
        """Propose with `stages.propose`, before the first iteration of a loop."""
        with self.programs.place.in_force():
            return self.programs.stage.propose(
                self.slots.state, window, num_tokens, num_proposed=num_proposed
            )

    def choose(
        self,
        window: DecodeWindow,
        hidden: jax.Array,
        outputs: Outputs,
        proposals: tuple[Draft, Proposed],
        variant: Variant,
    ) -> tuple[Outputs, Chosen, tuple[Draft, Proposed]]:
        """Choose the tokens of an iteration, and propose the next ones."""
        draft, proposed = proposals
        with self.programs.place.in_force():
            self.slots.state, outputs, chosen, draft, proposed = self.programs.stage.choose(
                self.params,
                self.slots.state,
                window,
                hidden,
                outputs,
                draft,
                proposed,
                variant=variant,
            )
        return outputs, chosen, (draft, proposed)

    def send(
        self, index: np.ndarray, chosen: Chosen, num_proposed: np.ndarray | None = None
    ) -> None:
        """Send this stage, which is not the last one, the tokens chosen for the slots at `index`.

        The chosen tokens replace `num_proposed` newest tokens of each slot; None replaces none.
        """
        chosen = jax.device_put(chosen, self.programs.place.whole)
        self._incoming.append(_Sampled(index, chosen, num_proposed))

    def no_outputs(
        self, num_rows: int, most: int, variant: Variant, num_proposed: int = 0
    ) -> Outputs:
        with self.programs.place.in_force():
            return self.programs.no_outputs(num_rows, most, variant, num_proposed=num_proposed)

    def catch_up(self) -> None:
        while self._incoming:
            self._append(self._incoming.popleft())

    def resize(self, num_pages: int, moves: Moves) -> None:
        old_num_pages = self.pages.num_pages
        with self.programs.place.in_force():
            self.pages.resize(num_pages, moves)
            self.slots.relocate(page_targets(old_num_pages, num_pages, moves))

    def renew(self) -> None:
        """Reset the slots and the cache after a step that failed."""
        self._incoming.clear()
        with self.programs.place.in_force():
            self.pages.renew()
            self.slots.renew()

    def fingerprint(self) -> bytes:
        """Return a hash of the weights of this stage and of the layout of its pages."""
        with self.programs.place.in_force():
            return fingerprint(self.params, self.programs.computed_by, self.pages.page_shape)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Keep every slot from advancing within the block."""
        self.catch_up()
        with self.programs.place.in_force(), self.slots.idle():
            yield
            self.catch_up()

    def delete(self) -> None:
        self._incoming.clear()
        self.pages.delete()
        self.slots.delete()

    def _take_in(self, slots: np.ndarray) -> None:
        """Append the tokens in transit for these slots, and all tokens sent before them."""
        last = max(
            (i for i, s in enumerate(self._incoming) if np.isin(s.index, slots).any()), default=-1
        )
        for _ in range(last + 1):
            self._append(self._incoming.popleft())

    def _append(self, sampled: _Sampled) -> None:
        with self.programs.place.in_force():
            self.slots.state = self.programs.stage.append(
                self.slots.state, sampled.index, sampled.chosen, sampled.num_proposed
            )

    def _moved(self, inputs: jax.Array | None) -> jax.Array | None:
        return None if inputs is None else jax.device_put(inputs, self.programs.place.whole)
