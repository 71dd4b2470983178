"""Adaptation of the schedule in a discrete simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from jaxserve.core.request import Completion
from jaxserve.engine.engine import Engine
from jaxserve.planning.schedules.adaptation import Adaptation, AnswerLength, unfinished
from jaxserve.planning.schedules.plan import Plan


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

    def after_step(self, engine: Engine, ended: Sequence[Completion], now_s: float) -> None:
        lengths = [length for completion in ended for length in answer_lengths(completion)]
        if self._next is None and self._adaptation.observe(lengths):
            plan = self._adaptation.revised(unfinished(engine.scheduler))
            self._next = None if plan is None else (now_s + self._search_s, plan)
        elif self._next is not None:
            self._adaptation.observe(lengths)
            if self._next[0] <= now_s:
                engine.adopt(self._next[1].iteration())
                self.adopted.append((now_s, self._next[1]))
                self._next = None


def answer_lengths(completion: Completion) -> list[AnswerLength]:
    """Return the lengths of a completion's samples that ended by themselves or at their limit."""
    admitted_s = completion.timing.admitted_s
    if admitted_s is None:
        return []
    return [
        AnswerLength(
            admitted_s=admitted_s,
            num_prompt=len(completion.prompt_token_ids),
            num_output=len(sample.token_ids),
        )
        for sample in completion.samples
        if sample.finish_reason in ("stop", "length") and sample.token_ids
    ]
