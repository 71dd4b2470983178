"""What an engine tells its observers, and two of them: counters, and records for a report."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, final

from jaxserve.core.clock import Clock
from jaxserve.core.config import EngineConfig, bucket
from jaxserve.core.metrics import BoundOutcome, bound_outcomes
from jaxserve.core.request import Completion, Request, Timing
from jaxserve.core.sampling_params import BOUND_NAMES
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.slack import Pace

# Number of newest records of each kind that are kept, which take some megabytes.
MAX_RECORDS = 32_768
# Number of newest steps from which the time of an iteration is computed.
_NUM_RECENT = 64
# Number of newest steps of a kind; no earlier one counts as slower than their median.
_NUM_NEWEST = 8
# Upper bounds of the ranges by which iterations are counted; those of vLLM's histogram.
ITERATION_TOKENS = (1, *(2**n for n in range(3, 15)))


class EngineObserver:
    """Something that an engine tells about its steps and requests, on the engine's thread.

    It must not block or raise. By default it ignores what it is told. `is_idle` says whether the
    step's device group may have nothing to do at this moment.
    """

    def on_planned(self, plan: StepPlan, scheduler: Scheduler, *, is_idle: bool) -> None:
        """A step is about to be submitted."""

    def on_submitted(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """A step was submitted."""

    def on_collected(self, plan: StepPlan, *, is_idle: bool) -> None:
        """A step was collected, or lost; its result is not applied yet."""

    def on_ended(self, request: Request, completion: Completion) -> None:
        """A request that had begun has ended."""


@dataclass(kw_only=True)
class EngineCounters:
    """Counters of an engine, or of several, since the start.

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
      num_snapshots_saved, num_snapshots_restored: states of recurrent layers that were kept when
        their sequences left their slots, and sequences that began with one.
      num_snapshots_out, num_snapshots_in: such states copied to the host and back.
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
    num_snapshots_saved: int = 0
    num_snapshots_restored: int = 0
    num_snapshots_out: int = 0
    num_snapshots_in: int = 0
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


@final
@dataclass
class EngineStats(EngineCounters, EngineObserver):
    """The counters that an engine keeps. Those of scheduling come from `Scheduler.counters`."""

    clock: Clock
    _busy_since_s: float | None = field(default=None, repr=False)
    _seen_busy_s: float = field(default=0.0, repr=False)

    def end_busy_period(self) -> None:
        if self._busy_since_s is not None:
            self.busy_s += self.clock.now() - self._busy_since_s
            self._busy_since_s = None

    def take_in(self, counters: Mapping[str, float]) -> None:
        for name, count in counters.items():
            setattr(self, name, count)

    def on_planned(self, plan: StepPlan, scheduler: Scheduler, *, is_idle: bool) -> None:
        now_s = self.clock.now()
        if self._busy_since_s is None:
            self._busy_since_s = self._seen_busy_s = now_s
        if is_idle:
            self.host_gap_s += now_s - self._seen_busy_s

    def on_submitted(self, plan: StepPlan, scheduler: Scheduler) -> None:
        self._seen_busy_s = self.clock.now()
        self.num_pages_handed_over += plan.num_pages_handed_over
        if plan.handovers:
            return
        self.num_steps += 1
        self.num_iterations += plan.num_iterations
        self.num_decode_loops += plan.is_decode_loop
        num_tokens = plan.num_tokens
        self.num_tokens += num_tokens
        counts = list(self.num_iterations_by_tokens)
        counts[bisect_left(ITERATION_TOKENS, num_tokens // plan.num_iterations)] += (
            plan.num_iterations
        )
        self.num_iterations_by_tokens = tuple(counts)
        if plan.is_decode_loop:
            self.num_padding_tokens += num_padding_of_loop(plan)
        self.take_in(scheduler.counters())
        self.num_accepted_by_place = scheduler.speculation.num_accepted_by_place
        self.max_pages_owned = max(self.max_pages_owned, scheduler.page_usage().num_owned)

    def on_collected(self, plan: StepPlan, *, is_idle: bool) -> None:
        """Record that the device is busy now, or was until the step that was just collected."""
        if not is_idle:
            self._seen_busy_s = self.clock.now()

    def on_ended(self, request: Request, completion: Completion) -> None:
        for name, outcome in bound_outcomes(request.params, completion).items():
            counts = list(getattr(self, f"num_bounds_{outcome}"))
            counts[BOUND_NAMES.index(name)] += 1
            setattr(self, f"num_bounds_{outcome}", tuple(counts))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step. Counts are those at its submission; times are seconds on the engine's clock.

    Attributes:
      kind: "mixed", "decode loop" or "handover"; of a cell engine, the name of the cell.
      num_rows: number of sequences that the step advances, or of nodes in the task.
      num_tokens: number of tokens over all iterations, including those after an early end.
      num_padding_tokens: number of unused tokens that pad the step to its compiled size, computed
        in addition to `num_tokens`.
      pages_owned, pages_reserved: number of pages in use, and of additional reserved pages.
      pages_cached: number of pages that are not in use and whose contents may be reused.
      pages_out, pages_in: number of pages copied to the host and back before the step.
      host_gap_s: seconds that the device may have idled before the step.
      collected_s: time at which the host had collected the step; None if it has not.
      replica: index of the replica that ran the step; each replica counts `index` from 0.
      group: device group that ran the step (`StepPlan`), or the worker of a cell engine.
    """

    index: int
    kind: str
    num_rows: int
    num_tokens: int
    num_iterations: int
    num_padding_tokens: int
    num_running: int
    num_waiting: int
    pages_owned: int
    pages_reserved: int
    pages_cached: int
    pages_out: int
    pages_in: int
    submitted_s: float
    host_gap_s: float
    collected_s: float | None = None
    replica: int = 0
    group: int = 0


def over_replicas(steps: Sequence[StepRecord], value: Callable[[StepRecord], int]) -> list[int]:
    """Return, for each step, the sum of its value and the other replicas' latest values."""
    latest: dict[int, int] = {}
    sums = []
    for step in steps:
        latest[step.replica] = value(step)
        sums.append(sum(latest.values()))
    return sums


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """One request that has ended; `num_output_tokens` is the sum over its samples.

    `conversation_id` is None if the request was not a turn of a conversation. `bounds` has the name
    and the outcome of each of its own latency bounds.
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: str
    timing: Timing
    conversation_id: str | None = None
    bounds: tuple[tuple[str, BoundOutcome], ...] = ()


@final
class Records:
    """A store of the newest records. One thread writes it, and any thread may read it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: deque[StepRecord] = deque(maxlen=MAX_RECORDS)
        self._requests: deque[RequestRecord] = deque(maxlen=MAX_RECORDS)

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The records of collected steps, oldest first."""
        with self._lock:
            return tuple(self._steps)

    @property
    def requests(self) -> tuple[RequestRecord, ...]:
        """The records of requests, in the order of their ends."""
        with self._lock:
            return tuple(self._requests)

    def add_step(self, step: StepRecord) -> None:
        with self._lock:
            self._steps.append(step)

    def add_request(self, request: RequestRecord) -> None:
        with self._lock:
            self._requests.append(request)

    def newest_steps(self, num: int) -> list[StepRecord]:
        with self._lock:
            return list(itertools.islice(reversed(self._steps), num))[::-1]


@final
class Recorder(EngineObserver):
    """The records of an engine. The engine's thread writes it, and any thread may read it.

    `stats`, which the engine tells first, has the time during which the device idled.

    Attributes:
      newest_step_s: the most seconds that the newest collected step took its devices.
    """

    def __init__(self, config: EngineConfig, stats: EngineStats, replica: int = 0):
        self.newest_step_s = 0.0
        self._config = config
        self._stats = stats
        self._recorded_gap_s = 0.0
        self._replica = replica
        self._records = Records()
        # Records that lack the time at which the step is collected.
        self._in_flight: dict[int, Callable[..., StepRecord]] = {}
        self._collected_s: dict[int, float] = {}  # device group -> the newest

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        return self._records.steps

    @property
    def requests(self) -> tuple[RequestRecord, ...]:
        return self._records.requests

    @property
    def iteration_s(self) -> float | None:
        """Median seconds of an iteration over the newest steps; None before the first step."""
        pace = self.pace()
        return None if pace is None else pace.iteration_s

    def pace(self) -> Pace | None:
        """Return median seconds over the newest steps; None before the first step.

        A step counts with each of its iterations. A few steps that waited for their executables
        (`warmup="background"`) do not change the median. After a slow spell, however long, the
        median is that of the spell until half of the newest 8 steps of a kind are fast again.
        """
        mixed, loops = (
            _recovered([(iteration_s, step.num_iterations) for iteration_s, step in steps])
            for steps in self._recent().values()
        )
        iteration_s = _median([*mixed, *loops])
        if iteration_s is None:
            return None
        decode_s, prefill_s = _median(loops), _median(mixed)
        return Pace(
            iteration_s=iteration_s,
            decode_s=iteration_s if decode_s is None else decode_s,
            prefill_s=iteration_s if prefill_s is None else prefill_s,
        )

    def least_s(self, plan: StepPlan) -> float:
        """Return a plan's least seconds, by the newest steps of its kind; 0 without any.

        An iteration with half of the tokens takes at least half of the time.
        """
        kind = "decode loop" if plan.is_decode_loop else "mixed"
        times_s = [
            iteration_s * min(plan.num_iterations, plan.num_tokens * step.num_iterations / tokens)
            for iteration_s, step in self._recent()[kind][-_NUM_NEWEST:]
            if (tokens := step.num_tokens)
        ]
        return min(times_s, default=0.0)

    def _recent(self) -> dict[str, list[tuple[float, StepRecord]]]:
        """Return seconds of an iteration of each of the newest steps, by its kind: mixed, loop."""
        before_s: dict[int, float] = {}  # of each device group
        found: dict[str, list[tuple[float, StepRecord]]] = {"mixed": [], "decode loop": []}
        for step in self._records.newest_steps(_NUM_RECENT):
            assert step.collected_s is not None
            if step.num_iterations:
                busy_s = step.collected_s - max(step.submitted_s, before_s.get(step.group, 0.0))
                found[step.kind].append((busy_s / step.num_iterations, step))
            before_s[step.group] = step.collected_s
        return found

    def on_planned(self, plan: StepPlan, scheduler: Scheduler, *, is_idle: bool) -> None:
        usage = scheduler.page_usage()
        kind = "mixed"
        if plan.handovers:
            kind, padding = "handover", 0
        elif plan.is_decode_loop:
            kind = "decode loop"
            padding = num_padding_of_loop(plan)
        else:
            encoded = plan.num_encoded
            buckets = self._config.token_buckets
            batches = (encoded, plan.num_tokens - encoded)
            padding = sum(bucket(size, buckets) - size for size in batches if size)
        gap_s = self._stats.host_gap_s - self._recorded_gap_s
        self._recorded_gap_s = self._stats.host_gap_s
        self._in_flight[plan.index] = partial(
            StepRecord,
            index=plan.index,
            kind=kind,
            num_rows=len(plan.rows),
            num_tokens=plan.num_tokens,
            num_iterations=plan.num_iterations,
            num_padding_tokens=padding,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            pages_owned=usage.num_owned,
            pages_reserved=usage.num_reserved,
            pages_cached=usage.num_cached,
            pages_out=len(plan.swaps_out),
            pages_in=len(plan.swaps_in),
            submitted_s=self._stats.clock.now(),
            host_gap_s=gap_s,
            replica=self._replica,
            group=plan.group,
        )

    def on_collected(self, plan: StepPlan, *, is_idle: bool) -> None:
        now_s = self._stats.clock.now()
        step = self._in_flight.pop(plan.index)(collected_s=now_s)
        self._records.add_step(step)
        self.newest_step_s = now_s - max(step.submitted_s, self._collected_s.get(step.group, 0.0))
        self._collected_s[step.group] = now_s

    def on_ended(self, request: Request, completion: Completion) -> None:
        record = RequestRecord(
            request_id=completion.request_id,
            num_prompt_tokens=len(completion.prompt_token_ids),
            num_output_tokens=sum(len(sample.token_ids) for sample in completion.samples),
            finish_reason=completion.finish_reason,
            timing=completion.timing,
            conversation_id=completion.conversation_id,
            bounds=tuple(bound_outcomes(request.params, completion).items()),
        )
        self._records.add_request(record)


def num_padding_of_loop(plan: StepPlan) -> int:
    """Return the tokens that a decode loop computes for idle slots of its window."""
    return plan.num_iterations * (plan.window_size - len(plan.rows))


def _recovered(weighted: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return steps of one kind, oldest first, none slower than the median of the newest ones."""
    most_s = _median(weighted[-_NUM_NEWEST:])
    return [] if most_s is None else [(min(value, most_s), num) for value, num in weighted]


def _median(weighted: list[tuple[float, int]]) -> float | None:
    num_left = sum(num for _, num in weighted) / 2
    for value, num in sorted(weighted):
        num_left -= num
        if num_left <= 0:
            return value
    return None


class RequestLog(Protocol):
    """A log that gets every request that began and ended, on the engine's thread."""

    def append(self, request: Request, completion: Completion, /) -> None:
        """Record the request, without blocking and without raising."""
        ...
