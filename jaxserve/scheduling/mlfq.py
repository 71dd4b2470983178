"""A queue of several levels with feedback: what has had much goes down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.policy import QueueView, ServiceOrder
from jaxserve.scheduling.sequence import Phase, Sequence


@final
@dataclass(frozen=True)
class FeedbackQueues(ServiceOrder):
    """The skip-join queue of FastServe (Wu et al., arXiv:2305.05920, section 4.1), by tokens.

    A request joins the first level whose quantum its prompt fits into, and goes down a level each
    time that its answer has had the level's quantum, which doubles from level to level. What had no
    token for `promotes_s` returns to the first level, so nothing starves. Within a level sequences
    go by arrival. `Unified(preempts=True)` preempts for those of a lower level.

    Assumed: a quantum is counted in tokens, not in measured time; the tokens of a loop that was
    planned before a change of level still come; KV is swapped when it must be, not ahead of time.

    Attributes:
      quantum: output tokens of the first level.
      prompt_tokens: prompt tokens that take as long as one output token.
      promotes_s: 3 s in the authors' code.
    """

    quantum: int = 8
    prompt_tokens: int = 128
    promotes_s: float = 3.0

    def new_state(self) -> Levels:
        return Levels(self)

    def level_of(self, prompt_length: int) -> int:
        """Return the level that a prompt of this length joins."""
        level = 0
        while self.prompt_tokens * self.quantum << level < prompt_length:
            level += 1
        return level


@final
@dataclass(eq=False, slots=True)
class _Standing:
    """A sequence's level, the tokens that it has had there, and when it had its newest one."""

    level: int
    served_s: float
    num_outputs: int = 0
    num_here: int = 0


@final
class Levels:
    """The level of each sequence in one scheduler."""

    def __init__(self, settings: FeedbackQueues):
        self._settings = settings
        self._places: dict[Sequence, _Standing] = {}

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[int, float, int]:
        place = self._places.get(sequence)
        arrival_s = sequence.request.arrival_s
        if place is None:
            level = self._settings.level_of(sequence.prompt_length)
            place = self._places[sequence] = _Standing(level, arrival_s)
        return place.level, arrival_s, sequence.key

    def update(self, queue: QueueView) -> bool:
        now_s = queue.now_s
        quantum, promotes_s = self._settings.quantum, self._settings.promotes_s
        has_changed = False
        for sequence, place in list(self._places.items()):
            if sequence.phase is Phase.FINISHED:
                del self._places[sequence]
                continue
            num_new = sequence.num_planned_outputs - place.num_outputs
            place.num_outputs += num_new
            if num_new > 0:
                place.served_s = now_s
                place.num_here += num_new
                while place.num_here >= quantum << place.level:
                    place.num_here -= quantum << place.level
                    place.level += 1
                    has_changed = True
            elif now_s - place.served_s >= promotes_s:
                has_changed = has_changed or place.level > 0
                place.level, place.num_here, place.served_s = 0, 0, now_s
        return has_changed
