"""Blame: what one request of a simulation waited for, step by step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import final

from jaxserve.engine.engine import Engine
from jaxserve.planning.simulator import Ended
from jaxserve.scheduling.sequence import Phase, Sequence

# A step with this share of its tokens has no room for another prompt.
_FULL = 0.9


@final
@dataclass(kw_only=True)
class Span:
    """A time in which a request was in one state; seconds from the start of the run.

    Attributes:
      cause: what it waited for, or what was computed of it.
      detail: numbers of the span's first step.
      num_steps: steps of the device that ended in it.
    """

    start_s: float
    end_s: float
    cause: str
    detail: str = ""
    num_steps: int = 1

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@final
class Blame:
    """A pilot that watches one request of `simulate` and changes nothing.

    A step is planned while the one before it runs, so what is seen after a step is submitted says
    what happens until the next look.

    Args:
      index: of the request among the items, and then the follow-ups.

    Attributes:
      spans: from its arrival to its end, once it has ended.
    """

    def __init__(self, index: int):
        self.spans: list[Span] = []
        self._id = f"request-{index}"
        self._sequence: Sequence | None = None
        self._has_ended = False
        self._since_s = 0.0
        self._doing = ("the running step", "it came while a step ran")
        # At the last look: iterations submitted, tokens computed of each prompt and of this
        # request, and the first in order if it would have fitted into what steps had freed.
        self._num_iterations = self._num_computed = 0
        self._prompts: dict[int, int] = {}
        self._fitting: int | None = None

    def after_step(self, engine: Engine, ended: Seq[Ended], now_s: float) -> None:
        scheduler = engine.scheduler
        num_iterations = engine.stats.num_iterations - self._num_iterations
        self._num_iterations = engine.stats.num_iterations
        num_others = self._count_prompts(scheduler.running)
        for request, completion in ended:
            if request.id == self._id and completion.timing.finished_s is not None:
                self._note(completion.timing.finished_s)
                self._has_ended = True
        if self._has_ended:
            return
        if self._sequence is None:
            every = (*scheduler.waiting, *scheduler.running)
            self._sequence = next((each for each in every if each.request.id == self._id), None)
            if self._sequence is None:
                return
            self._since_s = self._sequence.request.arrival_s
        self._note(now_s)
        num_own = self._sequence.kv.num_computed - self._num_computed
        self._num_computed = self._sequence.kv.num_computed
        if self._sequence.phase is Phase.WAITING:
            self._doing = self._waiting_for(engine, self._sequence, num_others)
        elif self._sequence.phase is Phase.RUNNING and num_iterations:
            self._doing = _running(self._sequence, num_own, num_iterations, num_others)

    def _count_prompts(self, running: Seq[Sequence]) -> int:
        """Return how many tokens of others' prompts were planned since the last look."""
        before, self._prompts = self._prompts, {}
        num = 0
        for each in running:
            done = self._prompts[each.key] = min(each.kv.num_computed, each.prompt_length)
            if each is not self._sequence:
                num += max(0, done - before.get(each.key, each.kv.num_found))
        return num

    def _waiting_for(self, engine: Engine, sequence: Sequence, num_others: int) -> tuple[str, str]:
        """Return what the first in order waits for, which keeps this one waiting, too.

        Pages that the last step freed come to the next plan, so the policy keeps back only what
        would have fitted at the last look, too.
        """
        scheduler, config = engine.scheduler, engine.scheduler.config
        waiting = scheduler.waiting
        place = next((i for i, each in enumerate(waiting) if each is sequence), 0)
        again = "preempted; " if sequence.times.admitted_s is not None else ""
        behind = f", behind {place} others in order" if place else ""
        num_running = len(scheduler.running)
        if num_running >= config.max_slots:
            return f"{again}slots", f"all {config.max_slots} slots are taken{behind}"
        first = waiting[0]
        needed = -(-scheduler.tokens_to_reserve(first) // config.page_size)
        available = scheduler.page_usage().num_available
        has_fitted, self._fitting = self._fitting, first.key if needed <= available else None
        if num_others + num_running >= _FULL * config.max_step_tokens:
            return f"{again}others' prompts", f"{num_others} tokens of them fill the step{behind}"
        if has_fitted != first.key or needed > available:
            whose = "it needs" if first is sequence else f"the first, {first.request.id}, needs"
            free = f" of {available} available" if needed > available else ", which are free now"
            return f"{again}memory", f"{whose} {needed} pages{free}{behind}"
        free = f"a slot and {available} pages are free, {needed} are needed"
        return f"{again}the policy", f"{free}, and it admits none{behind}"

    def _note(self, now_s: float) -> None:
        if now_s <= self._since_s:
            return
        cause, detail = self._doing
        if self.spans and self.spans[-1].cause == cause:
            last = self.spans[-1]
            last.end_s, last.num_steps = now_s, last.num_steps + 1
        else:
            span = Span(start_s=self._since_s, end_s=now_s, cause=cause, detail=detail)
            self.spans.append(span)
        self._since_s = now_s


def _running(
    sequence: Sequence, num_own: int, num_iterations: int, num_others: int
) -> tuple[str, str]:
    """Return what was planned of a running request: tokens of its own, and others' prompts."""
    if sequence.kv.awaits is not None:
        return "pages from the host", "its pages are copied back"
    if num_own <= 0:
        return "others' prompts", f"{num_others} tokens of other prompts go first"
    beside = f", beside {num_others} tokens of others' prompts" if num_others else ""
    if not sequence.output and sequence.kv.num_computed <= sequence.prompt_length:
        return "its prompt", f"{num_own} tokens{beside}"
    if num_own > num_iterations:
        return "its tokens again, after a preemption", f"{num_own} tokens{beside}"
    if num_others:
        return "its answer, beside others' prompts", f"{num_others} prompt tokens in the step"
    return "its answer", ""
