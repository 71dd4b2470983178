"""TRAIL: the shortest remaining answer first, and no preemption of one that is nearly complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxserve.scheduling.lengths import LengthEstimate, LengthTracker
from jaxserve.scheduling.policy import QueueView, ServiceOrder
from jaxserve.scheduling.sequence import Phase, Sequence


@final
@dataclass(frozen=True)
class LimitedPreemption(ServiceOrder):
    """TRAIL (Shahout et al., arXiv:2410.01035): shortest remaining first, to a limit.

    The remaining length is that of the newest reading of the probe, or of the prediction from the
    prompt. A waiting sequence preempts a running one with more left (`Unified(preempts=True)`),
    until that one has had the share `limit` of its first predicted length: its memory has grown by
    then, and it frees it soon.

    Assumed, since only the abstract could be read: the value of `limit`; KV is swapped where that
    costs less than computing it again; a sequence without an estimate is as long as it may be; a
    remaining token is a delay of `ageing_s`, so that nothing starves.

    Attributes:
      limit: c; at 1 all predicted tokens, at 0 nothing that has a token is preempted.
    """

    limit: float = 0.8
    ageing_s: float = 0.1

    def new_state(self) -> Remaining:
        return Remaining(self)


@final
class Remaining:
    """The remaining length of each sequence in one scheduler."""

    def __init__(self, how: LimitedPreemption):
        self._limit, self._ageing_s = how.limit, how.ageing_s
        # Planned tokens of each live sequence, and what was expected of it then.
        self._known: dict[Sequence, tuple[int, LengthEstimate | None, float]] = {}

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[int, float, int]:
        arrival_s, had = sequence.request.arrival_s, sequence.num_planned_outputs
        first = lengths.first_estimate(sequence)
        limit = sequence.max_length - sequence.prompt_length
        predicted = limit if first is None else min(first.expected_length, limit)
        if sequence.slot is not None and had and had >= int(self._limit * predicted):
            self._known[sequence] = had, None, 0.0
            return 0, arrival_s, sequence.key
        left = self._left(sequence, lengths.estimate(sequence))
        return 1, arrival_s + self._ageing_s * left, sequence.key

    def update(self, queue: QueueView) -> bool:
        has_changed = False
        for sequence in list(self._known):
            if sequence.phase is Phase.FINISHED:
                del self._known[sequence]
            elif sequence.num_planned_outputs != self._known[sequence][0]:
                has_changed = True
        return has_changed

    def _left(self, sequence: Sequence, estimate: LengthEstimate | None) -> float:
        """Return the expected remaining tokens; computed once for a sequence that waits."""
        had = sequence.num_planned_outputs
        known = self._known.get(sequence)
        if known is not None and known[:2] == (had, estimate) and estimate is not None:
            return known[2]
        left = float(sequence.num_outputs_left)
        if estimate is not None:
            left = min(estimate.expected_remaining(had), left)
        self._known[sequence] = had, estimate, left
        return left
