"""Which sequence is preempted when memory runs out, and what happens to its KV."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class LastInOrder:
    """Preempt as vLLM does. With `keeps_state` its KV goes to the host, else it is recomputed."""

    keeps_state: bool = False

    def ranked(self, candidates: Seq[Sequence], lengths: LengthTracker) -> Seq[Sequence]:
        return candidates[::-1]


@final
@dataclass(frozen=True)
class LongestRemaining:
    """Preempt by expected remaining tokens, given those that have come.

    An answer that is almost complete stays: it frees its memory soon. Without any estimate, or if
    estimates are not informative, the last in order is preempted. Sequences with a latency bound of
    their own are preempted last, and so are those that would end after all others
    (`LengthTracker.find_tail`).
    """

    keeps_state: bool = True

    def ranked(self, candidates: Seq[Sequence], lengths: LengthTracker) -> Seq[Sequence]:
        unbounded = [each for each in candidates if not each.request.has_bounds]
        bounded = [each for each in candidates if each.request.has_bounds]
        early = [each for each in unbounded if each.key not in lengths.tail]
        late = [each for each in reversed(unbounded) if each.key in lengths.tail]
        return [*_longest_first(early, lengths), *late, *_longest_first(bounded, lengths)]


def _longest_first(sequences: Seq[Sequence], lengths: LengthTracker) -> Seq[Sequence]:
    """Return the sequences by expectation; of equal ones, the last in order first."""
    last_first = sequences[::-1]
    forecast = lengths.forecast(last_first) if lengths.are_informative else None
    if forecast is None:
        return last_first
    places = np.argsort(-forecast.expected_remaining(), kind="stable")
    return [last_first[place] for place in places.tolist()]
