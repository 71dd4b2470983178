"""Which sequence goes first, and the sort keys of that order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, final

from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.policy import (
    AdmissionPolicy,
    Order,
    OrderState,
    QueueView,
    ServiceOrder,
)
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class FCFS:
    """Order by arrival; a preempted sequence keeps its place."""

    heeds_bounds: ClassVar[bool] = False
    heeds_priority: ClassVar[bool] = False
    max_passes = 0

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[float, int]:
        return (sequence.request.arrival_s, sequence.key)


@final
@dataclass(frozen=True)
class LongestFirst:
    """S3's packing of one bin (section 3.2; Johnson 1973): by reservation, the largest first.

    A sequence that does not fit is passed by those that do. The paper does not treat starvation;
    here a reserved token is a head start of `ageing_s` seconds, so that a sequence that arrives
    long after another comes after it whatever its length, and a sequence is passed at most
    `max_passes` times.

    Attributes:
      by: computes the reservation.
    """

    heeds_bounds: ClassVar[bool] = False
    heeds_priority: ClassVar[bool] = False

    by: AdmissionPolicy
    ageing_s: float = 1.0
    max_passes: int = 256

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[float, float, int]:
        arrival_s = sequence.request.arrival_s
        reserved = min(self.by.reserve_tokens(sequence, lengths), sequence.max_length)
        return arrival_s - self.ageing_s * reserved, arrival_s, sequence.key


@final
@dataclass(frozen=True)
class ShortestPredictedFirst:
    """Order by expected output length: the mean latency is least if short answers do not wait.

    An expected token is a delay of `ageing_s` seconds, so a sequence is overtaken only by those
    that arrive less than its expected length times `ageing_s` later. No answer counts as longer
    than its limit, which also replaces a missing estimate.
    """

    heeds_bounds: ClassVar[bool] = False
    heeds_priority: ClassVar[bool] = False

    ageing_s: float = 0.1
    max_passes: int = 0

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[float, float, int]:
        arrival_s = sequence.request.arrival_s
        expected = float(sequence.max_length - sequence.prompt_length)
        estimate = lengths.estimate(sequence)
        if estimate is not None:
            expected = min(estimate.expected_length, expected)
        return arrival_s + self.ageing_s * expected, arrival_s, sequence.key


@final
@dataclass(frozen=True)
class Priority:
    """Order by priority (higher first), then deadline (earlier first), then arrival; with ageing.

    A level of priority is a head start of `ageing_s` seconds, and a deadline is one of at most
    `ageing_s`. A request is overtaken only by requests that arrive less than
    `(1 + levels) * ageing_s` after it, where `levels` is the difference of their priorities; so no
    stream of urgent requests starves it. A deadline later than `ageing_s` has no effect. Requests
    that arrive together are in strict order of priority, then deadline.
    """

    heeds_bounds: ClassVar[bool] = False
    heeds_priority: ClassVar[bool] = True
    max_passes = 0

    ageing_s: float = 300.0

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[float, float, int]:
        request = sequence.request
        due_s = request.arrival_s + self.ageing_s
        if request.deadline_s is not None:
            due_s = min(due_s, max(request.deadline_s, request.arrival_s))
        return (due_s - request.priority * self.ageing_s, request.arrival_s, sequence.key)


@final
@dataclass(frozen=True)
class DueFirst:
    """Order by the time at which a request is due: the earliest deadline first.

    With bounds of its own that is `Request.due_s`. A request without one, or with a longer bound,
    is due `ageing_s` seconds after its arrival. So it is overtaken only by requests that arrive
    less than `ageing_s` after it. If no request has a bound, this is first come, first served.
    """

    heeds_bounds: ClassVar[bool] = True
    heeds_priority: ClassVar[bool] = False
    max_passes = 0

    ageing_s: float = 300.0

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[float, float, int]:
        request = sequence.request
        due_s = request.arrival_s + self.ageing_s
        if request.due_s is not None:
            due_s = min(due_s, request.due_s)
        return due_s, request.arrival_s, sequence.key


@final
@dataclass(frozen=True)
class TailFirst(ServiceOrder):
    """As `DueFirst`, except that sequences that would end after all others go first.

    If nothing else arrives, a long answer that begins late runs at the end beside few others, while
    the device could serve many. So a sequence goes first, the longest one before the rest, as soon
    as it is expected to take as long as all others together (`LengthTracker.find_tail`): earlier
    would only delay shorter ones. Without predictions, while requests arrive, and with requests
    that have bounds of their own, this is `DueFirst`.
    """

    heeds_bounds: ClassVar[bool] = True

    ageing_s: float = 300.0

    def new_state(self) -> TailPlaces:
        return TailPlaces(DueFirst(self.ageing_s))


# The tail is looked for again when the number of live sequences has changed by a sixteenth, and by
# four at least. If any came since the last look, there is none until the next: in a stream of
# requests, ends and arrivals alternate.
_LOOKS = 16
_FEWEST_CHANGES = 4


@final
class TailPlaces:
    """The keys of one scheduler's sequences under `TailFirst`."""

    def __init__(self, due: DueFirst):
        self._due = due
        self._num_live = self._num_running = 0
        # The key of the newest sequence at the last look.
        self._newest = -1

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[float, float, float, int]:
        return -lengths.tail.get(sequence.key, 0.0), *self._due.key(sequence, lengths)

    def update(self, queue: QueueView) -> bool:
        # What ended in the last step leaves its slots to others in this one.
        width = max(self._num_running, len(queue.running))
        self._num_running = len(queue.running)
        num_live = self._num_running + queue.num_waiting
        if abs(num_live - self._num_live) < max(_FEWEST_CHANGES, num_live / _LOOKS):
            return False
        live = [*queue.running, *queue.waiting]
        newest = max(map(attrgetter("key"), live), default=-1)
        has_new, self._num_live, self._newest = newest > self._newest, num_live, newest
        return queue.lengths.find_tail(
            live,
            width,
            arrivals_an_iteration=math.inf if has_new else _arrivals_an_iteration(queue),
            slack=1.0 / _LOOKS,
        )


def _arrivals_an_iteration(queue: QueueView) -> float:
    rate, iteration_s = queue.expected_arrivals() or (0.0, 0.0)
    return rate * iteration_s


@final
class OrderKeys:
    """The sort key of every sequence that waits or runs, as the order gave it at one moment.

    The lists of waiting and of running sequences are sorted by these stored keys. So a reading that
    changes the expected length of a sequence never leaves a list unsorted; it counts when the
    sequence's key is next computed.
    """

    def __init__(self, order: Order | ServiceOrder, lengths: LengthTracker):
        self._service: OrderState | None = None
        self._order: Order | OrderState
        if isinstance(order, ServiceOrder):
            self._order = self._service = order.new_state()
        else:
            self._order = order
        self._lengths = lengths
        self._keys: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def take(self, sequence: Sequence) -> None:
        """Compute and store the key; a list that has the sequence must be sorted after this."""
        self._keys[sequence.key] = self._order.key(sequence, self._lengths)

    def have_changed(self, queue: QueueView) -> bool:
        """Return whether all keys must be taken again before the next step is planned."""
        return self._service is not None and self._service.update(queue)

    def of(self, sequence: Sequence) -> Any:
        return self._keys[sequence.key]

    def drop(self, sequence: Sequence) -> None:
        del self._keys[sequence.key]
