"""Sequences in, step plans out."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass, replace
from typing import final

from jaxserve.core.clock import Clock
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import JaxserveError
from jaxserve.core.request import FinishReason, Request
from jaxserve.memory.page_table import PageTable
from jaxserve.memory.relocation import Moves, fewest_moves
from jaxserve.scheduling.collect import append_outputs, append_prompt_logprobs
from jaxserve.scheduling.keeper import Keeper
from jaxserve.scheduling.lengths.tracker import LengthTracker
from jaxserve.scheduling.limits import max_length, not_finite, too_long
from jaxserve.scheduling.order_keys import OrderKeys
from jaxserve.scheduling.plan import StepPlan, StepResult
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.sequence import Phase, Sequence
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.scheduling.step import Step
from jaxserve.scheduling.supervisor import Supervisor, SwapCosts
from jaxserve.scheduling.waiting_pool import WaitingPool
from predictor import Refinement

# Waiting sequences, the first ones, whose pages are prefetched.
_MAX_AWAITED = 4


@final
@dataclass(frozen=True)
class Progress:
    """News of one sequence from one step: `num_new` tokens, and perhaps its end."""

    sequence: Sequence
    num_new: int


@final
class Scheduler:
    """Owns every sequence from submission to its end, and the pages and slots they hold.

    `plan` decides the next step from lengths alone and advances the sequences as if it had
    already run; `apply` takes in what a step delivered. Plans are applied in the order in which
    they were made; any number of them may lie in between.
    """

    def __init__(
        self,
        config: EngineConfig,
        policy: Policy,
        clock: Clock,
        swap_costs: SwapCosts | None = None,
        refinement: Refinement | None = None,
    ):
        self.config = config
        self.policy = policy
        self.keeper = Keeper(config, policy.retention, clock.now, swap_costs)
        self.supervisor = Supervisor(
            0 if policy.retention.uses_host else config.num_host_pages,
            config.page_size,
            policy.preemption,
            swap_costs,
        )
        self.pool = self.keeper.cache.pool
        self.lengths = LengthTracker(refinement)
        self.slots = SlotTable(config.max_slots, config.slot_buckets)
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_admitted_since_loop = 0
        # When to plan again at the latest; until then the policy or the disk lets the device idle.
        self.wake_s: float | None = None
        self._clock = clock
        self.order_keys = OrderKeys(policy.order, self.lengths)
        self.waiting = WaitingPool(self.order_keys, policy.order.max_passes, config.page_size)
        self._sequences: dict[int, Sequence] = {}
        self._pending_releases: list[int] = []
        self._num_plans = 0
        self._next_key = 0

    # ---- requests ----

    @property
    def has_work(self) -> bool:
        """Whether some sequence has not ended."""
        return bool(self._sequences)

    def add(self, request: Request) -> list[Sequence]:
        """Put a request's samples into the waiting pool.

        One that was checked against a larger pool, and does not fit this one, has failed then.
        """
        samples: list[Sequence] = []
        for index in range(request.params.n):
            sequence = Sequence(
                key=self._next_key,
                request=request,
                sample_index=index,
                max_length=max_length(request, self.config),
                table=PageTable(self.pool, self.config.page_size),
                leader=samples[0] if samples else None,
            )
            self._next_key += 1
            self._sequences[sequence.key] = sequence
            self.lengths.add(sequence)
            self._wait(sequence)
            samples.append(sequence)
        for sequence in samples:
            self._fail_if_too_long(sequence)
        return samples

    def end(
        self, sequence: Sequence, reason: FinishReason, error: JaxserveError | None = None
    ) -> None:
        """End a sequence now, wherever it stands; what is in flight of it will be ignored."""
        if sequence.phase is Phase.FINISHED:
            return
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
            self.supervisor.forget(sequence)
            self.keeper.retrieval.release(sequence.key)
        if sequence.phase is Phase.RUNNING:
            self._leave_slot(sequence, has_ended=True)
        sequence.phase = Phase.FINISHED
        sequence.finish_reason = reason
        sequence.error = error
        sequence.finished_s = self._clock.now()
        if error is None:
            self.keeper.leave(sequence)
        else:
            self.keeper.forget(sequence)
        self._close_table(sequence)
        self.lengths.remove(sequence)
        self.order_keys.drop(sequence)
        self.keeper.read(sequence)
        if sequence.num_in_flight == 0:
            del self._sequences[sequence.key]

    # ---- one step ----

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can advance before results are applied.

        Or before something has come from the disk: until `wake_s`, unless it arrives earlier.
        """
        self.keeper.retrieval.take_in()
        step = Step(self)
        self.policy.iteration.select(step)
        if step.is_futile:  # but now there is room for others, or for more of the same
            step = Step(self)
            self.policy.iteration.select(step)
        self.wake_s = step.wake_s
        if not step.has_rows:
            if self.wake_s is None:
                self.wake_s = self.keeper.retrieval.gives_up_s
            return None
        if self.config.prefetches:
            self.keeper.bring_ahead(itertools.islice(self.waiting.ready(), _MAX_AWAITED))
        plan = step.finish(self._num_plans, tuple(self._pending_releases))
        self._num_plans += 1
        if plan.is_decode_loop:
            self.num_admitted_since_loop = 0
        self._pending_releases.clear()
        for sequence in dict.fromkeys(step.sequences):
            if sequence.num_outputs_left == 0:
                self._close(sequence)
        return plan

    def plan_farewell(self) -> StepPlan | None:
        """Copy kept pages to the host, where there is room; None where nothing is left to copy."""
        self.keeper.free_share = 1.0
        plan = Step(self).finish(self._num_plans, ())
        self._num_plans += 1
        return plan if plan.swaps_out else None

    def apply(self, plan: StepPlan, result: StepResult) -> list[Progress]:
        """Take in what `plan` delivered; returns the news in the order of the rows."""
        news = []
        live = []
        for index, row in enumerate(plan.rows):
            sequence = self._sequences[row.sequence_key]
            sequence.num_in_flight -= 1
            if sequence.phase is Phase.FINISHED:
                if sequence.num_in_flight == 0:
                    del self._sequences[sequence.key]
                continue
            news.append(Progress(sequence, self._take(sequence, index, plan, result)))
            if sequence.num_in_flight == 0:
                self.keeper.read(sequence)
            live.append((index, sequence))
        self.lengths.refine(plan, result, live)
        return news

    def _take(self, sequence: Sequence, index: int, plan: StepPlan, result: StepResult) -> int:
        row = plan.rows[index]
        if result.prompt_logprobs is not None and index in result.prompt_logprobs:
            append_prompt_logprobs(sequence, row.start, result.prompt_logprobs[index])
        count = int(result.num_tokens[index])
        if count:
            append_outputs(sequence, result, index, count)
            if sequence.first_token_s is None:
                sequence.first_token_s = self._clock.now()
        if not result.finite[index]:
            self.end(sequence, "error", not_finite(sequence))
        elif count and sequence.output[-1] in sequence.request.stop_token_ids:
            self.end(sequence, "stop")
        elif sequence.prompt_length + len(sequence.output) >= sequence.request.end_length(
            sequence.max_length, sequence.sample_index
        ):
            self.end(sequence, "length")
        return count

    # ---- what a step being built may do ----

    def now(self) -> float:
        return self._clock.now()

    def first_admissible(self) -> Sequence | None:
        """The first waiting sequence that fits, if it may pass those before it."""
        if self.slots.num_free == 0:
            return None
        return self.waiting.first_that(self._fits, self.keeper.awaits_disk, self.pool.num_available)

    def _fits(self, sequence: Sequence) -> bool:
        missing = sequence.table.pages_for(self.tokens_to_reserve(sequence))
        if not sequence.host_pages:
            missing -= self.keeper.num_shared(sequence)
        if missing > self.pool.num_available:
            return False
        admission = self.policy.admission
        headroom = admission.headroom_pages(sequence, self.running, self.config, self.lengths)
        return missing + headroom <= self.pool.num_available

    def admit(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Move a waiting sequence that is `first_admissible` into a slot.

        Returns (index, page) of the pages it begins with: shared with others, to be filled from the
        host, or between such pages.
        """
        tokens = self.tokens_to_reserve(sequence)
        if not sequence.host_pages:
            entries = self.keeper.begin(sequence, tokens)
        elif sequence.table.reserve(tokens):
            entries = sequence.table.grow(sequence.num_computed)
        else:
            entries = None
        if entries is None:
            raise AssertionError("admit() was called although the sequence does not fit")
        self.supervisor.admitted(sequence)
        self.waiting.admit(sequence)
        sequence.slot = self.slots.take()
        sequence.phase = Phase.RUNNING
        sequence.last_step = self._num_plans - 1
        self.num_admitted_since_loop += 1
        if sequence.admitted_s is None:
            sequence.admitted_s = self._clock.now()
        bisect.insort(self.running, sequence, key=self.order_keys.of)
        return entries

    def preempt(self, sequence: Sequence, *, has_outgrown: bool = False) -> None:
        """Back to the waiting pool; its tokens are kept, and its KV as the supervisor decides.

        Args:
          has_outgrown: because it used up its reservation; it comes back with a larger one.
        """
        self.keeper.leave(sequence)
        self.supervisor.save(sequence)
        self._leave_slot(sequence, has_ended=False)
        self._close_table(sequence)
        if has_outgrown:
            sequence.num_outgrown += 1
            self.supervisor.num_outgrown += 1
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(sequence)

    def restart(self, sequence: Sequence, *, keeps_output: bool) -> None:
        """Compute a sequence anew, because its KV is no longer right; nothing may be in flight.

        Without `keeps_output` its answer begins anew too.
        """
        if sequence.phase is Phase.RUNNING:
            self._leave_slot(sequence, has_ended=False)
            self.keeper.forget(sequence)
            self._close_table(sequence)
            sequence.num_computed = 0
            self._wait(sequence)
        self.supervisor.forget(sequence)
        if sequence.phase is Phase.WAITING and not keeps_output:
            sequence.forget_output()
            self.lengths.restart(sequence)
            self.waiting.replace(sequence)

    # ---- another pool ----

    def make_room(self, num_pages: int) -> list[tuple[int, int]]:
        """Preempt until what is owned and promised fits into `num_pages` pages.

        Nothing may be in flight. The last in order go first, as ever; and those whose length limit
        a pool of this size changes, because the device knows it from their admission.

        Returns:
          The fewest (from, to) moves of pages; `resize` takes them, once they are carried out.
        """
        config = replace(self.config, num_pages=num_pages)
        for sequence in tuple(reversed(self.running)):
            if max_length(sequence.request, config) != sequence.max_length:
                self.preempt(sequence)
        while self.pool.num_owned + self.pool.num_promised > num_pages - 1:
            self.preempt(self.running[-1])
        self.supervisor.forget_unsaved()
        self.keeper.cache.forget_uncopied()
        self.keeper.cache.shrink(num_pages)
        return fewest_moves(self.pool.held, num_pages)

    def resize(self, num_pages: int, moves: Moves) -> None:
        """Go on with a pool of `num_pages` pages, after `make_room` for them.

        A waiting sequence gets the length limit that it would have if it were submitted now. One
        without room for its next token fails with PromptTooLongError, as it would there.
        """
        self.pool.resize(num_pages, moves)
        self.config = replace(self.config, num_pages=num_pages)
        targets = dict(moves)
        self.keeper.cache.relocate(targets)
        for sequence in self.running:
            sequence.table.relocate(targets)
        for sequence in self.waiting:
            sequence.max_length = max_length(sequence.request, self.config)
            self._fail_if_too_long(sequence)
        self.waiting.sort()

    def _fail_if_too_long(self, sequence: Sequence) -> None:
        if sequence.num_outputs_left <= 0:
            self.end(sequence, "error", too_long(sequence, self.config))

    # ---- transitions ----

    def _wait(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        self.waiting.add(sequence)

    def _close(self, sequence: Sequence) -> None:
        self._leave_slot(sequence, has_ended=True)
        sequence.phase = Phase.CLOSING
        self.keeper.leave(sequence)
        self._close_table(sequence)

    def _leave_slot(self, sequence: Sequence, *, has_ended: bool) -> None:
        assert sequence.slot is not None
        self.running.remove(sequence)
        if has_ended and self.policy.iteration.keeps_finished_rows:
            self.slots.hold(sequence.slot)
        else:
            self.slots.release(sequence.slot)
        if not self.running:
            self.slots.release_held()
        self._pending_releases.append(sequence.slot)
        sequence.slot = None

    def _close_table(self, sequence: Sequence) -> None:
        sequence.table.close()
        sequence.ahead.clear()

    def tokens_to_reserve(self, sequence: Sequence) -> int:
        """When it is admitted."""
        wanted = self.policy.admission.reserve_tokens(sequence, self.lengths)
        return min(max(wanted, sequence.planned_length + 1), sequence.max_length)

    # ---- invariants ----

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant of DESIGN.md section 4 is broken."""
        self.keeper.cache.check_integrity()
        owned: dict[int, int] = {}
        promised = num_on_host = 0
        for sequence in self._sequences.values():
            holds = sequence.table.num_reserved > 0
            assert holds == (sequence.phase is Phase.RUNNING), f"{sequence.phase} holds={holds}"
            promised += sequence.table.num_reserved - sequence.table.num_pages
            assert sequence.num_computed <= sequence.table.num_pages * self.config.page_size or (
                sequence.phase is not Phase.RUNNING
            ), "computed tokens lie outside the page table"
            for page in sequence.table.pages:
                owned[page] = owned.get(page, 0) + 1
            num_on_host += len(sequence.host_pages)
            assert not sequence.host_pages or sequence.phase is Phase.WAITING, "KV in two places"
        assert promised == self.pool.num_promised, "promises do not add up"
        assert len(owned) == self.pool.num_owned, "owned pages do not add up"
        for page, count in owned.items():
            assert self.pool.refcount(page) == count, f"page {page}: wrong reference count"
        host = self.supervisor.host
        assert num_on_host == host.num_pages - host.num_free, "host pages do not add up"
        taken = [sequence.slot for sequence in self.running]
        num_taken = self.slots.num_live - self.slots.num_held
        assert len(set(taken)) == len(taken) == num_taken, "slots do not add up"
