"""Records of steps and requests, for a report."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, final

from jaxserve.core.config import EngineConfig, bucket
from jaxserve.core.metrics import BoundOutcome, bound_outcomes
from jaxserve.core.request import Completion, Request, Timing
from jaxserve.engine.stats import EngineStats
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.slack import Pace

# Number of newest records of each kind that are kept, which take some megabytes.
MAX_RECORDS = 32_768
# Number of newest steps from which the time of an iteration is computed.
_NUM_RECENT = 64
# Number of newest steps of a kind; no earlier one counts as slower than their median.
_NUM_NEWEST = 8


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
class Recorder:
    """The records of an engine. The engine's thread writes it, and any thread may read it."""

    def __init__(self, config: EngineConfig, replica: int = 0):
        self._config = config
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
        before_s: dict[int, float] = {}  # of each device group
        # (seconds of an iteration, iterations) of each step, by its kind.
        found: dict[str, list[tuple[float, int]]] = {"mixed": [], "decode loop": []}
        for step in self._records.newest_steps(_NUM_RECENT):
            assert step.collected_s is not None
            if step.num_iterations:
                busy_s = step.collected_s - max(step.submitted_s, before_s.get(step.group, 0.0))
                found[step.kind].append((busy_s / step.num_iterations, step.num_iterations))
            before_s[step.group] = step.collected_s
        mixed, loops = _recovered(found["mixed"]), _recovered(found["decode loop"])
        iteration_s = _median([*mixed, *loops])
        if iteration_s is None:
            return None
        decode_s, prefill_s = _median(loops), _median(mixed)
        return Pace(
            iteration_s=iteration_s,
            decode_s=iteration_s if decode_s is None else decode_s,
            prefill_s=iteration_s if prefill_s is None else prefill_s,
        )

    def step_submitted(
        self, plan: StepPlan, scheduler: Scheduler, now_s: float, host_gap_s: float
    ) -> None:
        usage = scheduler.page_usage()
        kind = "mixed"
        if plan.handovers:
            kind, padding = "handover", 0
        elif plan.is_decode_loop:
            kind = "decode loop"
            padding = plan.num_iterations * (plan.window_size - len(plan.rows))
        else:
            encoded = plan.num_encoded
            buckets = self._config.token_buckets
            batches = (encoded, plan.num_tokens - encoded)
            padding = sum(bucket(size, buckets) - size for size in batches if size)
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
            submitted_s=now_s,
            host_gap_s=host_gap_s,
            replica=self._replica,
            group=plan.group,
        )

    def step_collected(self, index: int, now_s: float) -> float:
        """Record that a step was collected; return the most seconds that it took its devices."""
        step = self._in_flight.pop(index)(collected_s=now_s)
        self._records.add_step(step)
        before_s = self._collected_s.get(step.group, 0.0)
        self._collected_s[step.group] = now_s
        return now_s - max(step.submitted_s, before_s)

    def request_ended(self, completion: Completion, bounds: Mapping[str, BoundOutcome]) -> None:
        record = RequestRecord(
            request_id=completion.request_id,
            num_prompt_tokens=len(completion.prompt_token_ids),
            num_output_tokens=sum(len(sample.token_ids) for sample in completion.samples),
            finish_reason=completion.finish_reason,
            timing=completion.timing,
            conversation_id=completion.conversation_id,
            bounds=tuple(bounds.items()),
        )
        self._records.add_request(record)


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


def record_end(
    stats: EngineStats, recorder: Recorder, request: Request, completion: Completion
) -> None:
    outcomes = bound_outcomes(request.params, completion)
    stats.after_end(outcomes)
    recorder.request_ended(completion, outcomes)
