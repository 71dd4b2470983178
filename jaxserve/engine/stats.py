"""Counters of the host loop."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from jaxserve.core.clock import Clock
from jaxserve.core.metrics import BoundOutcome
from jaxserve.core.sampling_params import BOUND_NAMES
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import Scheduler

if TYPE_CHECKING:  # records, which this module is read for, load no JAX
    from jaxserve.execution.executor import StepHandle

# Upper bounds of the ranges by which iterations are counted; those of vLLM's histogram.
ITERATION_TOKENS = (1, *(2**n for n in range(3, 15)))


@final
@dataclass
class EngineStats:
    """Counters of the loop since its start. Those of scheduling come from `Scheduler.counters`.

    The host gap is the time during which the device was idle although work waited. It is an upper
    bound: a device that is idle at a submission counts as idle since it was last observed busy.

    Attributes:
      num_steps, num_decode_loops, num_iterations: number submitted.
      num_tokens: prompt and output tokens computed, including iterations after an early end.
      num_iterations_by_tokens: iterations that compute no more tokens than each of
        `ITERATION_TOKENS` and more than the one before; last, those that compute more than all.
      num_padding_tokens: tokens computed for idle slots of a window, without those of mixed steps.
      num_preemptions: number of times that a sequence was sent back to the waiting pool.
      num_outgrown: preemptions of sequences that had used up their reservation.
      num_pages_out, num_pages_in: pages copied to the host and back.
      num_pages_handed_over: pages copied from one device group to another.
      num_pages_prefetched: pages copied back while their sequences still waited.
      num_recomputed: tokens of preempted sequences whose KV was dropped and is computed again.
      num_prefix_queried: tokens in full pages of admitted sequences, looked up in the prefix cache.
      num_prefix_hit: queried tokens that the prefix cache had.
      num_prefix_hit_on_host, num_prefix_hit_on_disk: hits on the host and on the disk.
      num_evicted_tokens: queried tokens that the prefix cache had evicted recently.
      num_refined: number of times that a probe's reading changed a sequence's length estimate.
      num_taken_back: planned output tokens that steps did not deliver before their answers' end.
      num_handovers_lost: sequences whose pages did not arrive at the other device group.
      num_lost_steps: steps that the device could not compute for lack of memory, or after such a
        step; the requests of the first have failed, the others were computed again.
      num_constrained: requests with a grammar.
      num_forced: output tokens that their grammars forced, which took no step of their own.
      num_drafts: number of times that proposals were computed after a sequence's newest token.
      num_draft_tokens, num_accepted_tokens: proposals that decode loops computed, and those of them
        that became output.
      num_accepted_by_place: accepted proposals at each place of a draft; empty in a runtime that
        does not speculate.
      num_bounds_kept, num_bounds_missed, num_bounds_refused: latency bounds of single requests, by
        outcome, in the order of `BOUND_NAMES`.
      max_pages_owned: maximum number of pages in use at the same time.
      busy_s: seconds during which there was work.
      host_gap_s: seconds of `busy_s` during which the device may have been idle.
      planning_s: seconds that the scheduler took, during which the device works.
      penalty_s: seconds of the device that preemptions took, by costs measured at the start.
      mask_s: seconds of host threads that compute which tokens grammars allow.
    """

    clock: Clock
    num_steps: int = 0
    num_decode_loops: int = 0
    num_iterations: int = 0
    num_tokens: int = 0
    num_iterations_by_tokens: tuple[int, ...] = (0,) * (len(ITERATION_TOKENS) + 1)
    num_padding_tokens: int = 0
    num_preemptions: int = 0
    num_outgrown: int = 0
    num_pages_out: int = 0
    num_pages_in: int = 0
    num_pages_handed_over: int = 0
    num_pages_prefetched: int = 0
    num_recomputed: int = 0
    num_prefix_queried: int = 0
    num_prefix_hit: int = 0
    num_prefix_hit_on_host: int = 0
    num_prefix_hit_on_disk: int = 0
    num_evicted_tokens: int = 0
    num_refined: int = 0
    num_taken_back: int = 0
    num_handovers_lost: int = 0
    num_lost_steps: int = 0
    num_constrained: int = 0
    num_forced: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_place: tuple[int, ...] = ()
    num_bounds_kept: tuple[int, ...] = (0,) * len(BOUND_NAMES)
    num_bounds_missed: tuple[int, ...] = (0,) * len(BOUND_NAMES)
    num_bounds_refused: tuple[int, ...] = (0,) * len(BOUND_NAMES)
    max_pages_owned: int = 0
    busy_s: float = 0.0
    host_gap_s: float = 0.0
    planning_s: float = 0.0
    penalty_s: float = 0.0
    mask_s: float = 0.0
    _busy_since_s: float | None = field(default=None, repr=False)
    _seen_busy_s: float = field(default=0.0, repr=False)

    def start_busy_period(self) -> None:
        if self._busy_since_s is None:
            self._busy_since_s = self._seen_busy_s = self.clock.now()

    def end_busy_period(self) -> None:
        if self._busy_since_s is not None:
            self.busy_s += self.clock.now() - self._busy_since_s
            self._busy_since_s = None

    def after_plan(self, seconds: float) -> None:
        self.planning_s += seconds

    def after_end(self, bounds: Mapping[str, BoundOutcome]) -> None:
        for name, outcome in bounds.items():
            counts = list(getattr(self, f"num_bounds_{outcome}"))
            counts[BOUND_NAMES.index(name)] += 1
            setattr(self, f"num_bounds_{outcome}", tuple(counts))

    def before_submit(self, newest: StepHandle | None) -> None:
        self.start_busy_period()
        if newest is None or newest.is_ready():
            self.host_gap_s += self.clock.now() - self._seen_busy_s

    def after_submit(self, plan: StepPlan, scheduler: Scheduler) -> None:
        self._seen_busy_s = self.clock.now()
        self.num_pages_handed_over += plan.num_pages_handed_over
        if plan.handovers:
            return
        self.num_steps += 1
        self.num_iterations += plan.num_iterations
        self.num_decode_loops += plan.is_decode_loop
        num_tokens = plan.num_tokens
        self.num_tokens += num_tokens
        self._count_iterations(plan.num_iterations, num_tokens // plan.num_iterations)
        if plan.is_decode_loop:
            self.num_padding_tokens += plan.num_iterations * (plan.window_size - len(plan.rows))
        self.take_in(scheduler.counters())
        self.num_accepted_by_place = scheduler.speculation.num_accepted_by_place
        self.max_pages_owned = max(self.max_pages_owned, scheduler.page_usage().num_owned)

    def _count_iterations(self, num_iterations: int, num_tokens: int) -> None:
        counts = list(self.num_iterations_by_tokens)
        counts[bisect_left(ITERATION_TOKENS, num_tokens)] += num_iterations
        self.num_iterations_by_tokens = tuple(counts)

    def after_loss(self, num_steps: int) -> None:
        self.num_lost_steps += num_steps

    def take_in(self, counters: Mapping[str, float]) -> None:
        for name, count in counters.items():
            setattr(self, name, count)

    def after_collect(self, newest: StepHandle | None) -> None:
        """Record that the device is busy now, or was until the step that was just collected."""
        if newest is None or not newest.is_ready():
            self._seen_busy_s = self.clock.now()
