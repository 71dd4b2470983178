"""How far the processes of a job are with their steps, and which of them are behind.

A process that lives, but does not take part in a collective, blocks all others inside it for ever:
JAX's heartbeat goes on, and no exception is raised (jax-ml/jax issue 38503).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, final


class StepCounts(NamedTuple):
    """Steps of a process since the job began; a step has a number, from 1."""

    num_begun: int
    num_ended: int


@final
@dataclass(eq=False)
class PendingStep:
    """A step of this process."""

    number: int
    begun_s: float
    is_done: Callable[[], bool] | None = None  # None until it is submitted

    def submitted(self, is_done: Callable[[], bool]) -> None:
        """Record how to ask whether the devices have computed the step; it must not wait."""
        self.is_done = is_done


@final
class Progress:
    """The steps of this process that its devices have not computed yet.

    One thread begins steps, and another one may ask about them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        self._num_begun = 0
        self._pending: deque[PendingStep] = deque()
        self._ended_s = clock()

    @contextmanager
    def step(self) -> Iterator[PendingStep]:
        """A block that submits the next step.

        The step has ended if the block raises, or does not call `submitted`.
        """
        with self._lock:
            self._num_begun += 1
            step = PendingStep(self._num_begun, self._clock())
            self._pending.append(step)
        try:
            yield step
        finally:
            if step.is_done is None:
                step.submitted(lambda: True)

    def counts(self) -> StepCounts:
        with self._lock:
            self._settle()
            first = self._pending[0].number if self._pending else self._num_begun + 1
            return StepCounts(self._num_begun, first - 1)

    def waiting_s(self) -> float:
        """Return for how long the devices have computed the first pending step; 0 without one."""
        with self._lock:
            self._settle()
            if not self._pending:
                return 0.0
            return self._clock() - max(self._pending[0].begun_s, self._ended_s)

    def _settle(self) -> None:
        """Drop the steps that have ended; steps end in their order."""
        while self._pending and self._pending[0].is_done is not None:
            try:
                if not self._pending[0].is_done():
                    return
            except RuntimeError:  # a failed step, whose error is raised where its result is read
                pass
            self._pending.popleft()
            self._ended_s = self._clock()


def describe_behind(
    counts: Mapping[int, StepCounts], name: Callable[[int], str], num_processes: int
) -> str:
    """Return which processes keep the others waiting, from the counts of those that answered."""
    silent = [each for each in range(num_processes) if each not in counts]
    if silent:
        return f"{_listed(silent, name)} did not answer, as where a program is stopped or hangs"
    begun = {each: count.num_begun for each, count in counts.items()}
    late = _least(begun)
    if late:
        least, most = min(begun.values()), max(begun.values())
        return (
            f"{_listed(late, name)} began {least} steps, and others {most}, as where a program "
            "hangs before its devices get the next one"
        )
    late = _least({each: count.num_ended for each, count in counts.items()})
    if late:
        return (
            f"the devices of {_listed(late, name)} have not ended the step, and those of others "
            "have"
        )
    return (
        "the devices of all processes are inside the step, so that one of them, or the network "
        "between them, hangs; NCCL_DEBUG=WARN shows what NCCL knows"
    )


def _least(values: Mapping[int, int]) -> list[int]:
    """Return the keys with the least value; none if all are equal."""
    least = min(values.values())
    return [] if least == max(values.values()) else [k for k, v in values.items() if v == least]


def _listed(ids: Sequence[int], name: Callable[[int], str]) -> str:
    return " and ".join(map(name, ids))
