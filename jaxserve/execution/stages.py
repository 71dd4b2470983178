"""Stages on their devices, and what executors of one stage and of several have in common."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple, final

import jax
import numpy as np

from jaxserve.core.config import EngineConfig, bucket
from jaxserve.execution.device_slots import DeviceSlots, DeviceStates
from jaxserve.execution.model_executor import (
    ModelExecutor,
    PooledPart,
    PromptPart,
    SubmittedStep,
    resize_all,
)
from jaxserve.execution.pages import (
    PAGES_A_CALL,
    DevicePages,
    HostContents,
    SwapCostMeter,
    measured_costs,
    num_incoming,
    work_of_a_position,
)
from jaxserve.execution.weights import fingerprint
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.memory.page_pool import NULL_PAGE, Moves, page_targets
from jaxserve.models.batch import IncomingPages, KVCache
from jaxserve.scheduling.kv.manager import SwapCosts
from jaxserve.scheduling.plan import PageCopies, Row, StepPlan
from jaxserve.steps.encoding import pack_prompts
from jaxserve.steps.heads import Chosen
from jaxserve.steps.outputs import Outputs
from jaxserve.steps.packing import (
    ChoosingRows,
    DecodeWindow,
    MixedBatch,
    body_size,
    head_sizes,
    in_places,
    no_masks,
    pack_choosing,
    pack_masks,
    pack_rows,
    pack_window,
    sampling_first,
    sampling_slots,
)
from jaxserve.steps.programs import Programs
from jaxserve.steps.proposals import Draft
from jaxserve.steps.sampling.sampler import SamplingNeeds, Variant
from jaxserve.steps.stages import Proposed
from jaxserve.steps.step_function import abstract, as_list

# The name of an executable, and the function that compiles it.
WarmupStep = tuple[str, Callable[[], Any]]


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


class Hidden(NamedTuple):
    """The output of a stage in a mixed step, or hidden states, if it is the last one.

    Attributes:
      tokens: of every token, [T, E].
      rows: of every row, [S, E].
      tapped: what a probe reads, [S, E]; None without one.
    """

    tokens: jax.Array
    rows: jax.Array
    tapped: jax.Array | None


@final
class DeviceStage:
    """Some layers of a model, or all of them, on their devices.

    It owns its page cache and its copy of the slots, donates them to each step and keeps the step's
    results. It borrows the parameters.

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
        snapshots: KVCache | None = None,
        num_host_snapshots: int = 0,
    ):
        self.programs = programs
        self.params, self.arrays = params, as_list(params)  # steps get the arrays
        self.slots = DeviceSlots(
            programs.config, programs.place.whole, programs.shelf, looks_up=samples
        )
        self.pages = DevicePages(cache, programs.place.pages, num_host_pages, programs.shelf)
        places = programs.place.cache(programs.model_config)
        self.states = DeviceStates(
            programs.config, places, programs.shelf, snapshots, num_host_snapshots
        )
        self._incoming: deque[_Sampled] = deque()

    def update_params(self, params: Any) -> None:
        self.params, self.arrays = params, as_list(params)

    def drop_params(self) -> None:
        """Keep only the shapes of the parameters, until the next update."""
        self.update_params(abstract(self.params))

    def allocate_host(self) -> None:
        """Allocate all host memory now; raise HostMemoryError if there is too little."""
        self.pages.allocate_host()
        self.states.allocate_host()

    def incoming(self, back: PageCopies) -> IncomingPages:
        return self.pages.incoming(back, self.programs.config.num_incoming_pages)

    def edit(self, plan: StepPlan) -> None:
        """Apply the plan's edits to the slots. Call it before the plan's rows."""
        if self._incoming:
            self._redirect(plan)
        self.slots.apply(plan)
        self.states.move(self.pages, plan.moves)
        self.states.restore(self.pages, plan.restores)

    def _redirect(self, plan: StepPlan) -> None:
        """Have tokens in transit follow the plan's moves of slots."""
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

    def mixed(
        self, batch: MixedBatch, inputs: jax.Array | None, incoming: IncomingPages | None = None
    ) -> Hidden:
        """Compute this stage's layers of a batch; `inputs` are the previous stage's tokens."""
        if self._incoming:
            slots: Any = batch.slot[: int((batch.query_length > 0).sum())]
            self._take_in(slots)
        self.pages.cache, *hidden = self.programs.mixed_body(
            self.arrays,
            self.pages.cache,
            self.slots.state,
            batch,
            self.programs.plan_mixed(batch),
            self._moved(inputs),
            incoming,
            self.programs.draft_mixed(batch),
        )
        return Hidden(*hidden)

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

    def pool(self, hidden: Hidden, batch: MixedBatch, rows: Sequence[Row]) -> jax.Array:
        """Return what rows that pool deliver, [slots, width]. Only on the last stage."""
        return self.programs.pool(self.arrays, hidden.tokens, hidden.rows, batch, rows)

    def prompt_logprobs(self, hidden: Hidden, batch: MixedBatch) -> Any:
        """Return arrays over a batch's tokens, for `PromptPart`. Only on the last stage."""
        return self.programs.prompt_logprobs(self.arrays, self.slots.state, hidden.tokens, batch)

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
        self.pages.cache, hidden = self.programs.stage.decode(
            self.arrays,
            self.pages.cache,
            self.slots.state,
            pack_window(window, rows),
            self.programs.plan_decode(rows, window, iteration, num_proposed),
            self._moved(inputs),
            proposed,
        )
        return hidden

    def sample(
        self, hidden: Hidden, index: np.ndarray, masks: Any, variant: Variant
    ) -> tuple[Outputs, Chosen]:
        """Choose a token for the slots at `index`, int32 [R]; `max_slots` skips a row.

        Only the last stage samples, verifies, proposes and chooses.
        """
        with_masks = () if masks is None else (masks,)
        programs = self.programs
        self.slots.state, outputs, chosen = programs.mixed_head(
            self.arrays,
            self.slots.state,
            hidden.rows,
            index,
            hidden.tapped,
            programs.probe_params,
            *with_masks,
            variant=variant,
        )
        return outputs, chosen

    def verify(
        self, hidden: Hidden, rows: ChoosingRows, masks: Any, variant: Variant
    ) -> tuple[Outputs, Chosen]:
        """Choose tokens for rows of which some have proposals and may get several tokens."""
        programs = self.programs
        self.slots.state, outputs, chosen = programs.verifying_head(
            self.arrays,
            self.slots.state,
            hidden.rows,
            rows,
            hidden.tapped,
            programs.probe_params,
            masks,
            variant=variant,
        )
        return outputs, chosen

    def sample_one(
        self, hidden: jax.Array, index: np.ndarray, outputs: Outputs, variant: Variant
    ) -> tuple[Outputs, Chosen]:
        """Choose the tokens of an iteration of a loop that does not speculate."""
        self.slots.state, outputs, chosen = self.programs.stage.head(
            self.arrays, self.slots.state, hidden, index, outputs, variant=variant
        )
        return outputs, chosen

    def propose(
        self, window: DecodeWindow, num_tokens: jax.Array, num_proposed: int
    ) -> tuple[Draft, Proposed]:
        """Propose with `stages.propose`, before the first iteration of a loop."""
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
        """Choose the tokens of an iteration of a loop that speculates, and propose the next."""
        draft, proposed = proposals
        self.slots.state, outputs, chosen, draft, proposed = self.programs.stage.choose(
            self.arrays,
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
        if not self.pages.num_buffers:  # layers without attention, which read no page
            return
        old_num_pages = self.pages.num_pages
        with self.programs.place.in_force():
            self.pages.resize(num_pages, moves)
            self.slots.relocate(page_targets(old_num_pages, num_pages, moves))

    def renew(self) -> None:
        """Reset the slots and the cache after a step that failed."""
        self._incoming.clear()
        self.pages.renew()
        self.slots.renew()
        self.states.renew()

    def fingerprint(self) -> bytes:
        """Return a hash of the weights of this stage and of the layout of its pages."""
        with self.programs.place.in_force():
            drafting = self.programs.draft_params
            more = () if drafting is None else (fingerprint(drafting),)
            layout = self.pages.page_shape, self.programs.config.layer_windows
            return fingerprint(self.params, self.programs.computed_by, *layout, *more)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Keep every slot from advancing within the block."""
        self.catch_up()
        with self.slots.idle():
            yield
            self.catch_up()

    def delete(self) -> None:
        self._incoming.clear()
        self.pages.delete()
        self.slots.delete()
        self.states.delete()
        self.params, self.arrays = None, []

    def _take_in(self, slots: np.ndarray) -> None:
        """Append the tokens in transit for these slots, and all tokens sent before them."""
        last = max(
            (i for i, s in enumerate(self._incoming) if np.isin(s.index, slots).any()), default=-1
        )
        for _ in range(last + 1):
            self._append(self._incoming.popleft())

    def _append(self, sampled: _Sampled) -> None:
        self.slots.state = self.programs.stage.append(
            self.slots.state, sampled.index, sampled.chosen, sampled.num_proposed
        )

    def _moved(self, inputs: jax.Array | None) -> jax.Array | None:
        return None if inputs is None else jax.device_put(inputs, self.programs.place.whole)


class StepExecutor(ModelExecutor):
    """An executor of plans on the stages of a model, all on devices of this process's mesh.

    The host submits all work in the order in which the devices run it, and does not wait: the
    arrays that pass from step to step and from stage to stage keep the order.

    Args:
      config: the stages' configuration, with the number of host pages that each of them has.
      whole: structure, shapes and dtypes of the whole model's parameters.
      micro_batches: maximum number of micro-batches of a step.
      strict: raise on any compilation after the warm-up.
      takes_masks: whether rows may have masks of grammars.
    """

    def __init__(
        self,
        config: EngineConfig,
        stages: Sequence[DeviceStage],
        whole: Any,
        *,
        micro_batches: int = 1,
        strict: bool = False,
        takes_masks: bool = False,
    ):
        super().__init__(config, strict=strict)
        self.refinement = stages[-1].programs.refinement
        self._stages = tuple(stages)
        self._whole = whole
        self._micro_batches = micro_batches
        self._takes_masks = takes_masks
        self._swap_costs = SwapCostMeter(
            stages[0].programs.shelf,
            (config.token_buckets, jax.tree.leaves(abstract(self._caches())), micro_batches),
            self._swap_timings,
            has_host_pages=config.num_host_pages > 0,
        )

    @property
    def swap_costs(self) -> SwapCosts | None:
        return self._swap_costs.costs

    @property
    def host_memory(self) -> HostMemory | None:
        if not self.config.num_host_pages:
            return None
        return HostContents([pages.host for pages in self.page_pools], self.fingerprint)

    @property
    def host_states(self) -> HostMemory | None:
        if not self.config.num_host_snapshots:
            return None
        return HostContents([stage.states.host for stage in self._stages], self.fingerprint)

    def fingerprint(self) -> bytes:
        """Return a hash that also depends on the stage plan, as contents of pages do."""
        digest = blake2b(digest_size=16)
        for stage in self._stages:
            digest.update(stage.fingerprint())
        return digest.digest()

    @property
    def stages(self) -> tuple[DeviceStage, ...]:
        """The stages in order, whose caches and slots the next step donates."""
        return self._stages

    @property
    def page_pools(self) -> tuple[DevicePages, ...]:
        return tuple(stage.pages for stage in self._stages)

    def submit(self, plan: StepPlan) -> SubmittedStep:
        self._raise_if_closed()
        with self._compilations.watch(plan):
            count = num_incoming(self.config, plan)
            for stage in self._stages:
                stage.states.save(stage.pages, plan.saves)
            self._swap(plan.swaps_out, plan.swaps_in[count:])
            for stage in self._stages:
                stage.edit(plan)
            needs = self._stages[-1].slots.needs(plan.rows)
            if plan.is_decode_loop:
                return self._decode(plan, needs)
            return self._mixed(plan, needs, plan.swaps_in[:count])

    def encode(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        self._raise_if_closed()
        programs, params = self._stages[0].programs, self._stages[0].params
        batch = jax.device_put(pack_prompts(programs.config, prompts), programs.place.whole)
        with programs.place.in_force():
            encoded = np.asarray(programs.encode(params, batch), np.float32)
        ends = np.cumsum([len(prompt) for prompt in prompts])
        pairs = zip(ends, prompts, strict=True)
        return [encoded[end - len(prompt) : end].copy() for end, prompt in pairs]

    def drop_params(self) -> None:
        for stage in self._stages:
            stage.drop_params()

    def resize(self, num_pages: int, moves: Moves) -> None:
        """Resize the pools; a new size needs another warm-up."""
        self._raise_if_closed()
        self._swap_costs.restart()
        resize_all(self._stages, self.config.num_pages, num_pages, moves)
        self.config = replace(self.config, num_pages=num_pages)
        self._compilations.expect_none(num_pages in self._warm_num_pages)

    @property
    def num_buffers(self) -> int:
        """The minimum over the stages with pages; 0 without any."""
        found = [stage.pages.num_buffers for stage in self._stages]
        return min(filter(None, found), default=0)

    @property
    def device(self) -> Any:
        """A device of the stage whose pages are the largest."""
        largest = max(self._stages, key=lambda stage: stage.pages.shard_bytes)
        return next(iter(largest.programs.place.whole.addressable_devices))

    def reset(self) -> bool:
        for stage in self._stages:
            stage.renew()
        return True

    def close(self) -> None:
        if not self._is_closed:
            for stage in self._stages:
                stage.delete()
            self._compilations.close()
        self._is_closed = True

    # ---- steps ----

    @abc.abstractmethod
    def _decode(self, plan: StepPlan, needs: SamplingNeeds) -> SubmittedStep:
        """Submit a decode loop."""

    def _batches(self, rows: list[tuple[int, Row]]) -> Iterable[list[tuple[int, Row]]]:
        """Cut rows, with their indices in the plan, into micro-batches."""
        return (rows,)

    def _is_made(self, num_tokens: int) -> bool:
        """Return whether the mixed step of this size is not still being compiled."""
        return True

    def _before_pass(self, slots: Iterable[int], num_rows: int, *, samples: bool) -> None:
        """Note a pass of `num_rows`, with padding, through all stages."""

    def _mixed(self, plan: StepPlan, needs: SamplingNeeds, late: PageCopies) -> SubmittedStep:
        """Submit a mixed step, with the `late` copies in the first micro-batch."""
        last = self._stages[-1]
        marker: Any = None
        if prompts := [row for row in plan.rows if row.encodes]:
            marker = self._encode(pack_rows(self.config, prompts)[0])
            if len(prompts) == len(plan.rows) and not late:
                return SubmittedStep(plan, needs, marker, (), np.empty(0, np.int32))
        # The step is one batch if a row returns prompt log-probabilities, so that their spans are
        # the step's, or if a row has proposals, since a micro-batch may not end among them.
        scores = any(row.wants_prompt_logprobs for row in plan.rows)
        computed = [(i, row) for i, row in enumerate(plan.rows) if not row.encodes]
        batches = (computed,) if scores or plan.has_proposals else self._batches(computed)
        outputs: list[Outputs] = []
        output_rows = np.full(len(plan.rows), -1, np.int32)
        num_outputs = 0
        prompt_part: PromptPart | None = None
        pooled: list[PooledPart] = []
        for batch in batches:
            batch = [batch[i] for i in sampling_first([row for _, row in batch])]
            parts = [(i, part) for i, row in batch for part in in_places(row)]
            rows = [row for _, row in parts]
            size = body_size(self.config, rows, is_coarse=bool(late), is_made=self._is_made)
            packed, starts = pack_rows(self.config, rows, size)
            sampling = [i for i, row in batch if row.samples]
            self._before_pass((row.slot for row in rows), size, samples=bool(sampling))
            hidden = self._pass(packed, late)
            late, marker = (), hidden.rows
            if scores:
                spans = {
                    i: slice(start, start + row.num_tokens)
                    for (i, row), start in zip(parts, starts, strict=True)
                    if row.wants_prompt_logprobs
                }
                prompt_part = PromptPart(last.prompt_logprobs(hidden, packed), spans)
            if places := {i: at for at, (i, row) in enumerate(parts) if row.num_pooled}:
                pooled.append(PooledPart(last.pool(hidden, packed, rows), places))
            if sampling:
                outputs.append(self._choose(plan, sampling, hidden, needs.variant))
                output_rows[sampling] = num_outputs + np.arange(len(sampling))
                num_outputs += len(outputs[-1].num_tokens)
        marker = outputs[-1].tokens if outputs else marker
        return SubmittedStep(plan, needs, marker, outputs, output_rows, prompt_part, pooled)

    def _choose(
        self, plan: StepPlan, sampling: Sequence[int], hidden: Hidden, variant: Variant
    ) -> Outputs:
        """Choose tokens for the plan's rows `sampling`, which come first in the batch.

        The devices compute the body while the masks are still being computed.
        """
        rows = [plan.rows[i] for i in sampling]
        if not plan.has_proposals:
            has_masks = plan.masks is not None
            index = sampling_slots(self.config, rows, variant, has_masks=has_masks)
            return self._sample(hidden, index, pack_masks(plan, sampling, len(index)), variant)
        order = [i for i in sampling for _ in in_places(plan.rows[i])]
        num_rows = bucket(len(order), head_sizes(self.config, variant, has_masks=True))
        masks = pack_masks(plan, order, num_rows)
        if masks is None:
            masks = no_masks(num_rows, self._stages[-1].programs.model_config.vocab_size)
        return self._verify(hidden, pack_choosing(self.config, rows, num_rows), masks, variant)

    def _sample(self, hidden: Hidden, index: np.ndarray, masks: Any, variant: Variant) -> Outputs:
        """Sample on the last stage, and send the tokens to the rest."""
        outputs, chosen = self._stages[-1].sample(hidden, index, masks, variant)
        for stage in self._stages[:-1]:
            stage.send(index, chosen)
        return outputs

    def _verify(self, hidden: Hidden, rows: ChoosingRows, masks: Any, variant: Variant) -> Outputs:
        """Choose tokens of rows with proposals on the last stage, and send them to the rest."""
        outputs, chosen = self._stages[-1].verify(hidden, rows, masks, variant)
        for stage in self._stages[:-1]:
            stage.send(np.asarray(rows.slot), chosen, np.asarray(rows.num_proposed))
        return outputs

    def _pass(
        self, packed: MixedBatch, late: PageCopies = (), *, brings_pages: bool = False
    ) -> Hidden:
        """Run a micro-batch through all stages; return the output of the last.

        Each stage makes the `late` copies from the host before its attention, layer by layer. If
        `brings_pages`, the executables of such copies run even if there are none.
        """
        hidden: Hidden | None = None
        for stage in self._stages:
            incoming = stage.incoming(late) if late or brings_pages else None
            hidden = stage.mixed(packed, None if hidden is None else hidden.tokens, incoming)
        assert hidden is not None, "a model without stages"
        return hidden

    def _encode(self, batch: MixedBatch) -> jax.Array:
        """Encode whole prompts on the first stage, and write keys and values on every stage."""
        encoded = self._stages[0].encode(batch)
        for stage in self._stages:
            stage.write_encoded(batch, encoded)
        return encoded

    def _swap(self, out: PageCopies, back: PageCopies) -> None:
        """Copy pages to the host, then from it; the stages' copies in one direction overlap."""
        for stage in self._stages:
            stage.pages.swap(out, ())
        for stage in self._stages:
            stage.pages.swap((), back)

    def _caches(self) -> list[KVCache]:
        return [stage.pages.cache for stage in self._stages]

    # ---- warm-up ----

    @abc.abstractmethod
    def _executables(self) -> list[WarmupStep]:
        """Return `warmup_steps`, without the measurement of page swaps."""

    def warmup_steps(self) -> list[WarmupStep]:
        """Return (name, function) of every executable; the last one measures page swaps."""
        steps = self._executables()
        if self._swap_costs.is_missing:
            steps.append(("page swaps", self._swap_costs.measure))
        return steps

    def finish_warmup(self) -> None:
        jax.block_until_ready([(stage.pages.cache, stage.slots.state) for stage in self._stages])
        super().finish_warmup()

    def use_idle_time(self) -> bool:
        """Do the next timing of page swaps."""
        if not (self._swap_costs.is_missing and self.is_warm):
            return False
        self._swap_costs.measure_on()
        return True

    def _swap_timings(self) -> Iterator[SwapCosts | None]:
        """Time copies of the null page and the prefill of an empty prompt.

        All stages work together, so that overlapping work counts once.
        """
        unused_page = self.config.num_host_pages
        out, back = ((NULL_PAGE, unused_page),), ((unused_page, NULL_PAGE),)
        batch, _ = pack_rows(self.config, (), self.config.token_buckets[-1])

        def swap() -> None:
            self._swap(out * PAGES_A_CALL, back * PAGES_A_CALL)
            jax.block_until_ready(self._caches())

        def prefill() -> None:
            for _ in range(self._micro_batches):
                if self.config.has_encoder:
                    self._encode(batch)
                else:
                    self._pass(batch)
            jax.block_until_ready(self._caches())

        return measured_costs(
            swap,
            prefill,
            num_pages=PAGES_A_CALL,
            num_tokens=self._micro_batches * len(batch.token_row),
            position_work=work_of_a_position(
                [stage.programs.model_config for stage in self._stages], self._whole
            ),
        )
