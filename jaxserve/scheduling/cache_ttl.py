"""CacheTTL: a program's KV stays while its tool runs, and older programs go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from jaxserve.memory.eviction import LRU, Eviction
from jaxserve.memory.snapshots import LearnedReuse
from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.policy import QueueView, ServiceOrder
from jaxserve.scheduling.sequence import Sequence

# Programs whose first arrival is remembered, the newest.
_NUM_PROGRAMS = 10_000


@final
@dataclass(frozen=True)
class ToolTime:
    """The time to live of a program's KV in CacheTTL (arXiv:2511.02230).

    It is the one of the past pauses with the most gain. A pause that ends in time saves the
    recomputation of the KV and a wait in the queue; against this stand the seconds for which the
    pages are held. So nothing is held if that never pays.

    Assumed, since only the paper's abstract could be read: a second for which pages are held costs
    as much as one that is saved. All tools have one distribution of pauses, since a request does
    not say which tool it calls; the authors' code has one for each tool. Before `num_known` pauses
    were seen the time is `default_s`, which that code always uses.

    Attributes:
      token_s: seconds to recompute a token.
    """

    token_s: float = 1e-4
    default_s: float = 2.0
    num_known: int = 5

    def hold_s(self, pauses_s: Seq[float], saved_s: float) -> float:
        if len(pauses_s) < self.num_known:
            return self.default_s
        pauses = np.sort(np.asarray(pauses_s, np.float64))
        num_in_time = np.arange(1, len(pauses) + 1)
        num_late = len(pauses) - num_in_time
        gain = num_in_time * saved_s - (np.cumsum(pauses) + num_late * pauses)
        best = int(np.argmax(gain))
        return float(pauses[best]) if gain[best] > 0.0 else 0.0


@final
@dataclass(frozen=True)
class HeldForTools:
    """Pages stay on the device; those of a program are held while its tool runs."""

    holding: ToolTime = ToolTime()
    keeps_pages: ClassVar[bool] = True
    uses_host: ClassVar[bool] = False
    states = LearnedReuse()
    learns_reuse = False
    free_share = 0.0

    @property
    def eviction(self) -> Eviction:
        return LRU()


@final
@dataclass(frozen=True)
class ProgramFirst(ServiceOrder):
    """First come, first served, by programs: a turn counts from its program's first one.

    A program is a conversation (`Request.conversation_id`). Assumed, so that a program without end
    starves no other: the head start of a turn is at most `max_head_start_s`.
    """

    max_head_start_s: float = 300.0

    def new_state(self) -> ProgramStarts:
        return ProgramStarts(self.max_head_start_s)


@final
class ProgramStarts:
    """When the programs of one scheduler began."""

    def __init__(self, max_head_start_s: float):
        self._max_head_start_s = max_head_start_s
        self._began_s: OrderedDict[str, float] = OrderedDict()

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[float, float, int]:
        program, arrival_s = sequence.request.conversation_id, sequence.request.arrival_s
        began_s = arrival_s
        if program is not None:
            began_s = self._began_s.setdefault(program, arrival_s)
            self._began_s.move_to_end(program)
            if len(self._began_s) > _NUM_PROGRAMS:
                self._began_s.popitem(last=False)
        return max(began_s, arrival_s - self._max_head_start_s), arrival_s, sequence.key

    def update(self, queue: QueueView) -> bool:
        return False
