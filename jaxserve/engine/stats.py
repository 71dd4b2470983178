"""Counters of the host loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from jaxserve.core.clock import Clock
from jaxserve.execution.protocol import StepHandle
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import Scheduler


@final
@dataclass
class EngineStats:
    """What the loop did so far. Counters of scheduling are those of `Scheduler.counters`.

    The host gap is the time the device had nothing to do although work waited. It is bounded from
    above: a device found idle at a submission is taken to have been idle since it was last seen
    busy.

    Attributes:
      num_steps, num_decode_loops, num_iterations: submitted.
      num_tokens: prompt and output tokens computed, iterations past an early end included.
      num_padding_tokens: computed without use (idle slots in the window; mixed steps not counted).
      num_preemptions: sequences sent back to the pool.
      num_outgrown: of these, because they had used up what was reserved for them.
      num_pages_out, num_pages_in: copied to the host and back.
      num_pages_handed_over: copied from one device group to another.
      num_pages_prefetched: of those that came back, the ones whose sequences waited yet.
      num_recomputed: tokens of preempted sequences whose KV was dropped, to be computed anew.
      num_prefix_queried: tokens of admitted sequences, in full pages, that the prefix cache could
        have had.
      num_prefix_hit: those that it had.
      num_prefix_hit_on_host, num_prefix_hit_on_disk: of these, the ones that came from there.
      num_evicted_tokens: of the queried, those that it had evicted not long before.
      num_refined: times that a probe's reading changed what was expected of a sequence's length.
      num_taken_back: output tokens that steps might have delivered and did not, although their
        answers had not ended.
      max_pages_owned: most pages in use at once.
      busy_s: seconds with work on hand.
      host_gap_s: of these, seconds the device may have idled.
      planning_s: seconds the scheduler took; the device works meanwhile.
      penalty_s: seconds of the device that preemptions took, by costs measured at the start.
    """

    clock: Clock
    num_steps: int = 0
    num_decode_loops: int = 0
    num_iterations: int = 0
    num_tokens: int = 0
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
    max_pages_owned: int = 0
    busy_s: float = 0.0
    host_gap_s: float = 0.0
    planning_s: float = 0.0
    penalty_s: float = 0.0
    _busy_since_s: float | None = field(default=None, repr=False)
    _seen_busy_s: float = field(default=0.0, repr=False)

    def start_busy_period(self) -> None:
        """Work arrived after a pause."""
        if self._busy_since_s is None:
            self._busy_since_s = self._seen_busy_s = self.clock.now()

    def end_busy_period(self) -> None:
        """Nothing is left to do."""
        if self._busy_since_s is not None:
            self.busy_s += self.clock.now() - self._busy_since_s
            self._busy_since_s = None

    def after_plan(self, seconds: float) -> None:
        """Count the time that the scheduler took for a plan."""
        self.planning_s += seconds

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
        self.num_tokens += plan.num_tokens
        if plan.is_decode_loop:
            self.num_padding_tokens += plan.num_iterations * (plan.window_size - len(plan.rows))
        for name, count in scheduler.counters().items():
            setattr(self, name, count)
        self.max_pages_owned = max(self.max_pages_owned, scheduler.page_usage().num_owned)

    def after_collect(self, newest: StepHandle | None) -> None:
        """A step that just ended was busy until now; so is one that still runs."""
        if newest is None or not newest.is_ready():
            self._seen_busy_s = self.clock.now()
