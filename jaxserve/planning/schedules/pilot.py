"""Adaptation of the schedule in a discrete simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from jaxserve.engine.engine import Engine
from jaxserve.planning.schedules.adaptation import Adaptation
from jaxserve.planning.schedules.observed import answer_lengths, unfinished
from jaxserve.planning.schedules.plan import Plan
from jaxserve.planning.simulator import Ended


@final
class AdaptingPilot:
    """A `simulator.Pilot` that has the engine follow the newest lengths, as a runtime does.

    Args:
      search_s: virtual seconds between the moment that calls for a search and the adoption of what
        it finds. The engine serves on meanwhile.

    Attributes:
      adopted: (virtual seconds, plan) of each plan that the engine has adopted.
    """

    def __init__(self, adaptation: Adaptation, *, search_s: float = 0.5):
        self.adopted: list[tuple[float, Plan]] = []
        self._adaptation = adaptation
        self._search_s = search_s
        self._next: tuple[float, Plan] | None = None

    def after_step(self, engine: Engine, ended: Sequence[Ended], now_s: float) -> None:
        lengths = [length for each in ended for length in answer_lengths(*each)]
        if self._next is None and self._adaptation.observe(lengths):
            plan = self._adaptation.revised(unfinished(engine.scheduler))
            self._next = None if plan is None else (now_s + self._search_s, plan)
        elif self._next is not None:
            self._adaptation.observe(lengths)
            if self._next[0] <= now_s:
                engine.adopt(self._next[1].iteration())
                self.adopted.append((now_s, self._next[1]))
                self._next = None
