"""The sequences that one step preempts."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import final

from jaxserve.scheduling.lengths.tracker import LengthTracker
from jaxserve.scheduling.policy import Preemption
from jaxserve.scheduling.sequence import Sequence


@final
class Victims:
    """The running sequences without a row, as the policy ranks them.

    They are ranked once for all preemptions of a step: an estimate of what a sequence will need
    changes only when it gets a row, and then it is not preempted any more.
    """

    def __init__(self, preemption: Preemption, lengths: LengthTracker):
        self._preemption = preemption
        self._lengths = lengths
        # The next one last; None before they are ranked.
        self._ranked: list[Sequence] | None = None

    def forget_ranks(self) -> None:
        """Take note that another sequence runs."""
        self._ranked = None

    def next(self, running: Seq[Sequence], have_rows: Collection[Sequence]) -> Sequence:
        """Return the one to preempt now; the first that runs if there is no other without a row.

        Args:
          running: in the policy's order.
          have_rows: those with a row in this step.
        """
        if self._ranked is None:
            candidates = [each for each in running[1:] if each not in have_rows]
            self._ranked = [*reversed(self._preemption.ranked(candidates, self._lengths))]
        while self._ranked:
            victim = self._ranked.pop()
            runs = victim.slot is not None and victim not in have_rows
            if runs and victim is not running[0]:
                return victim
        return running[0]
