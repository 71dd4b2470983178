"""The virtual token counter: tenants are served equally."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import final

from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.policy import QueueView, ServiceOrder
from jaxserve.scheduling.sequence import Phase, Sequence

# Counters of tenants without requests that are kept at least.
_MANY_IDLE = 64


@final
@dataclass(frozen=True)
class VirtualTokenCounter(ServiceOrder):
    """VTC: the tenant that was served least goes first (Sheng et al., arXiv:2401.00588).

    A tenant's counter grows by the price of each token of its requests: those of a prompt at its
    admission, those of an answer as they come (algorithm 2). A tenant that had nothing waiting is
    lifted to the least counter of those that have, or of the last that had, so that idling saves
    nothing up. Requests of one tenant (`SamplingParams.tenant`) go by arrival, and so do those
    without a tenant among each other.

    As in the paper, nothing is preempted for fairness. Assumed: a sequence that was preempted for
    memory comes back first; the samples of a request count each.

    Attributes:
      prompt_price, output_price: of a token; 1 and 2 in the paper's section 5.
    """

    prompt_price: float = 1.0
    output_price: float = 2.0

    def new_state(self) -> TokenCounters:
        return TokenCounters(self)


@final
class TokenCounters:
    """The counter of each tenant in one scheduler."""

    def __init__(self, prices: VirtualTokenCounter):
        self._prices = prices
        self._served: defaultdict[str | None, float] = defaultdict(float)
        # Output tokens that are counted of each live sequence; None before its prompt is.
        self._counted: dict[Sequence, int | None] = {}
        # Sequences that were never admitted, of each tenant.
        self._waiting: Counter[str | None] = Counter()
        # The price of the prompts of the same tenant that wait before each sequence.
        self._ahead: dict[int, float] = {}
        self._last_to_leave: str | None = None

    def served(self, tenant: str | None) -> float:
        """Return the price of what a tenant had, or was lifted to."""
        return self._served[tenant]

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[float, float, int]:
        if sequence not in self._counted:
            self._arrive(sequence)
        arrival_s = sequence.request.arrival_s
        if sequence.times.admitted_s is not None:
            return -1.0, arrival_s, sequence.key
        counter = self._served[_tenant(sequence)] + self._ahead.get(sequence.key, 0.0)
        return counter, arrival_s, sequence.key

    def update(self, queue: QueueView) -> bool:
        for sequence in list(self._counted):
            self._count(sequence)
        first = [each for each in queue.waiting if each.times.admitted_s is None]
        first.sort(key=lambda each: (each.request.arrival_s, each.key))
        before, self._waiting = self._waiting, Counter(map(_tenant, first))
        if left := before.keys() - self._waiting.keys():
            self._last_to_leave = max(left, key=self._served.__getitem__)
        ahead: defaultdict[str | None, float] = defaultdict(float)
        self._ahead.clear()
        for sequence in first:
            tenant = _tenant(sequence)
            self._ahead[sequence.key] = ahead[tenant]
            ahead[tenant] += self._prices.prompt_price * sequence.prompt_length
        self._drop_idle()
        return len(self._waiting) > 1

    def _arrive(self, sequence: Sequence) -> None:
        tenant = _tenant(sequence)
        self._counted[sequence] = None
        if not self._waiting[tenant]:
            others = [self._served[other] for other, num in self._waiting.items() if num]
            least = min(others) if others else self._served[self._last_to_leave]
            self._served[tenant] = max(self._served[tenant], least)
        self._waiting[tenant] += 1

    def _count(self, sequence: Sequence) -> None:
        counted, outputs = self._counted[sequence], sequence.num_planned_outputs
        if sequence.times.admitted_s is not None:
            price = self._prices.output_price * (outputs - (counted or 0))
            if counted is None:
                price += self._prices.prompt_price * sequence.prompt_length
            self._served[_tenant(sequence)] += price
            self._counted[sequence] = outputs
        if sequence.phase is Phase.FINISHED:
            del self._counted[sequence]

    def _drop_idle(self) -> None:
        """Forget counters below those of all that wait, to which their tenants would be lifted."""
        if not self._waiting or len(self._served) <= _MANY_IDLE + 2 * len(self._counted):
            return
        kept = {self._last_to_leave, *map(_tenant, self._counted)}
        least = min(self._served[tenant] for tenant in self._waiting)
        for tenant in self._served.keys() - kept:
            if self._served[tenant] <= least:
                del self._served[tenant]


def _tenant(sequence: Sequence) -> str | None:
    return sequence.request.params.tenant
