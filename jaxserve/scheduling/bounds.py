"""When requests are expected to begin and to end, and which bounds on latency can be met.

A request with a bound is in one of three cases.

- At its submission it is refused if it is expected to miss a bound, and other requests run or wait.
  (On an idle engine it begins at once, and the pace may be out of date.) Those before it in the
  policy's order are expected to go first, and it begins when enough of the others have ended or
  make way (`expected_late`).
- Otherwise it waits until there is room for it. It is refused as soon as it would be late even if
  it began at once (`too_late`).
- Once it has begun it is no longer refused.

Sequences without a bound wait while the computation of their prompts would make a running one with
a bound late (`scheduling.slack`).

A bound limits the seconds to the first token, to the end, or per token after the first. Tokens are
expected to take the time of an iteration without prompts.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import BoundNotMetError
from jaxserve.core.request import Request
from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Phase, Sequence
from jaxserve.scheduling.slack import Pace, alone_s, prompt_s

# A simulation of the queue is reused until it has one change for this many of its sequences.
_SEQUENCES_A_CHANGE = 256


@final
@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The expected rest of a request that has not ended, given the tokens that it has so far.

    A request without a prediction counts as long as its limit. Of several samples, the first to
    begin and the last to end count, and the tokens of all. Before any step was timed, times are
    None.

    Attributes:
      num_tokens: output tokens still to come.
      begins_in_s: 0 for a request that runs.
      ends_in_s: if no other request arrives.
    """

    num_tokens: float
    begins_in_s: float | None
    ends_in_s: float | None


def outlooks(
    scheduler: Scheduler, iteration_s: float | None, *, without: Collection[Sequence] = ()
) -> dict[str, Outlook]:
    """Return the outlook of every request that has tokens left to compute, by id.

    Waiting sequences are assumed to begin in the policy's order, as slots and memory become free,
    and every iteration, of `iteration_s` seconds, to advance all running ones. The running
    sequences `without` count as ended, and get no outlook.
    """
    queue = expected_queue(scheduler, without)

    def seconds(iterations: float) -> float | None:
        return None if iteration_s is None else iterations * iteration_s

    samples: dict[str, list[int]] = {}
    for i, sequence in enumerate(queue.sequences):
        samples.setdefault(sequence.request.id, []).append(i)
    return {
        name: Outlook(
            num_tokens=sum(queue.tokens[i] for i in which),
            begins_in_s=seconds(min(queue.begins[i] for i in which)),
            ends_in_s=seconds(max(queue.ends[i] for i in which)),
        )
        for name, which in samples.items()
    }


class ExpectedQueue(NamedTuple):
    """When sequences, running ones first, begin and end, in iterations from now."""

    sequences: list[Sequence]
    tokens: list[float]
    begins: list[float]
    ends: list[float]


def expected_queue(scheduler: Scheduler, without: Collection[Sequence]) -> ExpectedQueue:
    """Return when the sequences of a scheduler begin and end, as `outlooks` assumes."""
    running = [each for each in scheduler.running if each not in without]
    config, num_running = scheduler.config, len(running)
    sequences = [*running, *scheduler.waiting]
    tokens = scheduler.lengths.expected_tokens(sequences)
    pages = [_pages(scheduler, *each) for each in zip(sequences, tokens, strict=True)]
    lasts = expected_iterations(sequences, tokens, config)
    begins, ends = [0.0] * num_running, lasts[:num_running]
    # (its end, its pages) of each running sequence.
    busy = list(zip(ends, pages, strict=False))
    heapq.heapify(busy)
    num_free = scheduler.page_usage().num_usable - sum(pages[:num_running])
    now = 0.0
    for i in range(num_running, len(sequences)):
        while busy and (len(busy) >= config.max_slots or pages[i] > num_free):
            now, freed = heapq.heappop(busy)
            num_free += freed
        begins.append(now)
        ends.append(now + lasts[i])
        heapq.heappush(busy, (ends[i], pages[i]))
        num_free -= pages[i]
    return ExpectedQueue(sequences, tokens, begins, ends)


def expected_iterations(
    sequences: Seq[Sequence], tokens: Seq[float], config: EngineConfig
) -> list[float]:
    return [
        each.num_uncomputed / config.max_step_tokens + more
        for each, more in zip(sequences, tokens, strict=True)
    ]


def _pages(scheduler: Scheduler, sequence: Sequence, num_tokens: float) -> int:
    """Return the pages that are or will be reserved; the mean until the end where they grow."""
    if scheduler.policy.admission.extends:
        return sequence.kv.table.pages_for(int(sequence.planned_length + num_tokens / 2))
    return sequence.kv.table.reservation or sequence.kv.table.pages_for(
        scheduler.tokens_to_reserve(sequence)
    )


@final
class ArrivalOutlook:
    """Simulates the queue for requests that arrive, at a bounded cost for each.

    With fewer than `_SEQUENCES_A_CHANGE` waiting sequences each request has a simulation of its
    own. In a longer queue one simulation serves several arrivals and steps: a request begins when
    the first sequence after it was to begin, and those that arrived since do not count; they are at
    most one in `_SEQUENCES_A_CHANGE`.
    """

    def __init__(self) -> None:
        self._num_changes = 0
        # Of the newest simulation: the sequences that wait, by their place in the policy's order,
        # when they begin in iterations, and the running ones that count as ended.
        self._places: list[Any] = []
        self._begins: list[float] = []
        self._without: Collection[Sequence] = ()

    def step(self) -> None:
        self._num_changes += 1

    def of(
        self,
        scheduler: Scheduler,
        samples: Seq[Sequence],
        iteration_s: float,
        without: Collection[Sequence],
        *,
        at_once: bool = False,
    ) -> Outlook:
        """Return the outlook of a request that was just added; `at_once` ignores what waits."""
        self._num_changes += 1
        if not at_once and self._is_stale(scheduler, without):
            self._simulate(scheduler, without)
        tokens = scheduler.lengths.expected_tokens(samples)
        lasts = expected_iterations(samples, tokens, scheduler.config)
        places = [] if at_once else [scheduler.order_keys.of(each) for each in samples]
        begins = [self._begins[self._index(each)] for each in places] or [0.0] * len(samples)
        ends = [start + more for start, more in zip(begins, lasts, strict=True)]
        return Outlook(
            num_tokens=sum(tokens),
            begins_in_s=min(begins) * iteration_s,
            ends_in_s=max(ends) * iteration_s,
        )

    def _index(self, place: Any) -> int:
        """Return the index of the first sequence at or after a place, or of the last one."""
        return min(bisect.bisect_left(self._places, place), len(self._places) - 1)

    def _is_stale(self, scheduler: Scheduler, without: Collection[Sequence]) -> bool:
        num_simulated = len(self._places)
        num_changes = max(self._num_changes, abs(scheduler.num_waiting - num_simulated))
        return num_changes * _SEQUENCES_A_CHANGE > num_simulated or without != self._without

    def _simulate(self, scheduler: Scheduler, without: Collection[Sequence]) -> None:
        queue = expected_queue(scheduler, without)
        num_running = len(scheduler.running) - len(without)
        self._places = [scheduler.order_keys.of(each) for each in queue.sequences[num_running:]]
        self._begins = queue.begins[num_running:]
        self._without = without
        self._num_changes = 0


# Minimum number of stale entries before they are removed.
_MANY_OLD = 64


def expected_late(
    scheduler: Scheduler,
    samples: Seq[Sequence],
    pace: Pace | None,
    now_s: float,
    outlook_of: ArrivalOutlook,
    *,
    begins_at_once: bool = False,
) -> BoundNotMetError | None:
    """Return the error of a submitted request that is expected to miss a bound; None otherwise.

    Its outlook tells when it begins, after those before it in the policy's order, and when it ends:
    with the mean of its predicted length, or with its `max_tokens` if nothing was predicted.
    Running sequences that the policy preempts for it (`IterationShape.makes_way`) do not count, nor
    do failed `samples`. Without a `pace` nothing is refused. It `begins_at_once` if slots are free
    for it that no sequence without a bound may take.
    """
    request = samples[0].request
    own = [each for each in samples if each.phase is Phase.WAITING]
    if pace is None or not request.has_bounds or not own:
        return None
    away = _making_way(scheduler, own)
    outlook = outlook_of.of(scheduler, own, pace.iteration_s, away, at_once=begins_at_once)
    assert outlook.begins_in_s is not None and outlook.ends_in_s is not None
    wait_s = now_s - request.arrival_s + outlook.begins_in_s
    expected_s = {
        "latency_bound": now_s - request.arrival_s + outlook.ends_in_s,
        "first_token_bound": wait_s + prompt_s(own[0], scheduler.config, pace),
        "token_bound": pace.fastest_s,
    }
    return _late(request, outlook.num_tokens, wait_s, expected_s)


def too_late(
    samples: Seq[Sequence],
    lengths: LengthTracker,
    config: EngineConfig,
    pace: Pace | None,
    now_s: float,
) -> BoundNotMetError | None:
    """Return the error of a request that would miss a bound if it began now, or None.

    If `pace` is None, it is too late when a bound has passed.
    """
    request = samples[0].request
    if not request.has_bounds:
        return None
    passed_s = now_s - request.arrival_s
    tokens = lengths.expected_tokens(samples)
    expected_s = {"latency_bound": passed_s, "first_token_bound": passed_s, "token_bound": 0.0}
    if pace is not None:
        for name, needed_s in _needed_s(samples, tokens, config, pace).items():
            expected_s[name] += needed_s
    return _late(request, sum(tokens), passed_s, expected_s)


class Leeway(NamedTuple):
    """Limits up to which a waiting request is not `too_late`, if no longer output is expected.

    A prediction that arrives later is never longer: it replaces the limit on the output.
    """

    until_s: float
    fastest_s: float
    prefill_s: float


def leeway(
    samples: Seq[Sequence],
    lengths: LengthTracker,
    config: EngineConfig,
    pace: Pace,
    now_s: float,
) -> Leeway:
    """Return the leeway of a request that waits and has not begun.

    Half of the seconds that a bound leaves are for the passing time, and half for slower steps.
    """
    request = samples[0].request
    needed_s = _needed_s(samples, lengths.expected_tokens(samples), config, pace)
    until_s = fastest_s = prefill_s = math.inf
    for name, bound_s in request.params.bounds.items():
        needed = needed_s[name]
        if name == "token_bound":
            fastest_s = min(fastest_s, bound_s)
            continue
        spare_s = max(0.0, (bound_s - (now_s - request.arrival_s) - needed) / 2)
        until_s = min(until_s, now_s + spare_s)
        slower = 1 + spare_s / needed if needed > 0 else 0.0
        if name == "first_token_bound":
            prefill_s = min(prefill_s, slower * pace.prefill_s)
        else:
            fastest_s = min(fastest_s, slower * pace.fastest_s)
    return Leeway(until_s, fastest_s, prefill_s)


def _needed_s(
    samples: Seq[Sequence], tokens: Seq[float], config: EngineConfig, pace: Pace
) -> dict[str, float]:
    """Return the seconds that each bound must leave for a request that begins now, by name."""
    return {
        "latency_bound": max(
            alone_s(*each, config, pace) for each in zip(samples, tokens, strict=True)
        ),
        "first_token_bound": prompt_s(samples[0], config, pace),
        "token_bound": pace.fastest_s,
    }


def _making_way(scheduler: Scheduler, own: Seq[Sequence]) -> set[Sequence]:
    """Return the running sequences that are preempted for a request if it needs their room."""
    if not scheduler.policy.iteration.makes_way or not own:
        return set()
    keys = scheduler.order_keys
    place = min(keys.of(each) for each in own)
    return {
        each for each in scheduler.running if not each.request.has_bounds and keys.of(each) > place
    }


def _late(
    request: Request, num_tokens: float, wait_s: float, expected_s: Mapping[str, float]
) -> BoundNotMetError | None:
    for name, bound_s in request.params.bounds.items():
        if expected_s[name] > bound_s:
            num_each = num_tokens / request.params.n
            return BoundNotMetError(request.id, name, bound_s, expected_s[name], num_each, wait_s)
    return None


@final
class Deferred:
    """Refuses requests that would miss a latency bound of their own, unless they have begun.

    A request is checked again when its `Leeway` ends, so the cost of a step grows with the requests
    that may be late by then, not with all that wait.
    """

    def __init__(self) -> None:
        self._outlook = ArrivalOutlook()
        # Accepted requests, by number, in the order of submission; some have begun or ended.
        self._samples: dict[int, Seq[Sequence]] = {}
        self._num_added = self._num_kept = 0
        # Requests without a leeway.
        self._unknown: list[int] = []
        # By time, by seconds of an iteration and by those of one with prompts.
        self._ends = (_Ends(), _Ends(), _Ends())
        # The sizes that the leeways were computed with.
        self._config: EngineConfig | None = None

    def add(
        self, scheduler: Scheduler, samples: Seq[Sequence], pace: Pace | None, now_s: float
    ) -> BoundNotMetError | None:
        """Take the samples of a submitted request, or return why it is refused."""
        has_slots = self._has_reserved_slots(scheduler, len(samples))
        error = expected_late(
            scheduler, samples, pace, now_s, self._outlook, begins_at_once=has_slots
        )
        if error is not None:
            return error
        if len(self._samples) > 2 * self._num_kept + _MANY_OLD:
            self._samples = {n: each for n, each in self._samples.items() if _waits(each)}
            self._num_kept = len(self._samples)
        self._samples[self._num_added] = samples
        self._unknown.append(self._num_added)
        self._num_added += 1
        return None

    def _has_reserved_slots(self, scheduler: Scheduler, num_samples: int) -> bool:
        num_reserved = scheduler.policy.iteration.reserved_slots
        if not num_reserved:
            return False
        num_taken = sum(each.request.has_bounds for each in scheduler.running)
        num_taken += sum(len(each) for each in self._samples.values() if _waits(each))
        return num_taken + num_samples <= num_reserved

    def late(
        self, scheduler: Scheduler, pace: Callable[[], Pace | None], now_s: float
    ) -> Iterator[tuple[Sequence, BoundNotMetError]]:
        """Yield each sequence that would miss its bound if it began now, with its error.

        If nothing runs, the pace may be out of date; then only a bound that has passed counts.
        """
        self._outlook.step()
        newest = pace() if self._samples else None
        if newest is None:
            return
        known = newest if scheduler.running else None
        for number in self._due(scheduler.config, newest, now_s):
            samples = self._samples[number]
            if not _waits(samples):
                del self._samples[number]
                continue
            error = too_late(samples, scheduler.lengths, scheduler.config, known, now_s)
            if error is None:
                found = leeway(samples, scheduler.lengths, scheduler.config, newest, now_s)
                for ends, at in zip(self._ends, found, strict=True):
                    ends.put(number, at)
                continue
            del self._samples[number]
            for sequence in samples:
                yield sequence, error

    def _due(self, config: EngineConfig, pace: Pace, now_s: float) -> list[int]:
        """Return the numbers of the requests whose leeway has ended, in the order of submission."""
        if config is not self._config:
            self._config, self._unknown = config, list(self._samples)
        due = set(self._unknown)
        self._unknown = []
        values = now_s, pace.fastest_s, pace.prefill_s
        for ends, value in zip(self._ends, values, strict=True):
            due.update(ends.reached(value, self._samples))
        return sorted(due & self._samples.keys())


@final
class _Ends:
    """The values at which leeways end, the lowest first."""

    def __init__(self) -> None:
        self._newest: dict[int, float] = {}
        # (value, number); an entry counts if its value is the newest of its number.
        self._heap: list[tuple[float, int]] = []

    def put(self, number: int, at: float) -> None:
        if self._newest.get(number) != at:
            self._newest[number] = at
            heapq.heappush(self._heap, (at, number))

    def reached(self, value: float, present: dict[int, Seq[Sequence]]) -> Iterator[int]:
        if len(self._heap) > 2 * len(present) + _MANY_OLD:
            self._newest = {n: at for n, at in self._newest.items() if n in present}
            self._heap = [(at, n) for n, at in self._newest.items()]
            heapq.heapify(self._heap)
        while self._heap and self._heap[0][0] <= value:
            at, number = heapq.heappop(self._heap)
            if self._newest.get(number) == at:
                del self._newest[number]
                yield number


def _waits(samples: Seq[Sequence]) -> bool:
    """Whether a request has not begun: all of its samples wait, and none was ever admitted."""
    return all(each.phase is Phase.WAITING and each.times.admitted_s is None for each in samples)
