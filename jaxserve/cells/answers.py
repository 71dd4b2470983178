"""Requests in a cell engine, and the parts of their graphs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import final

import numpy as np

from jaxserve.cells.flat_graph import FlatGraph
from jaxserve.cells.graph_plan import Wanted
from jaxserve.cells.results import CellCompletion, CellPiece, CellSink
from jaxserve.core.errors import JaxserveError
from jaxserve.core.request import FinishReason, Timing

_log = logging.getLogger(__name__)


@final
class CellAnswer:
    """The answer to one request; its future is resolved exactly once, with a `CellCompletion`.

    Args:
      graph: the request's first graph.
      arrival_s: time of its submission on the engine's clock.
      sink: called with the pieces, and last with None, on the engine's thread. It must not block. A
        sink that raises is not called again.
    """

    def __init__(self, id: str, graph: FlatGraph, arrival_s: float, sink: CellSink | None = None):
        self.id = id
        self.graph = graph
        self.future: Future[CellCompletion] = Future()
        # A cancelled asyncio waiter cannot cancel the future.
        self.future.set_running_or_notify_cancel()
        self._sink = sink
        self._arrival_s = arrival_s
        self._begun_s: float | None = None
        self._first_value_s: float | None = None
        self._num_nodes = 0
        self._has_hit_limit = False

    @property
    def has_begun(self) -> bool:
        return self._begun_s is not None

    def begin(self, now_s: float) -> None:
        """Take note that the first task with a node of the request was submitted."""
        self._begun_s = now_s

    def wait_until(self, time_s: float) -> None:
        """Take note that the first task did not run before a time."""
        if self._begun_s is not None:
            self._begun_s = max(self._begun_s, time_s)

    def add_nodes(self, num: int) -> None:
        self._num_nodes += num

    def hit_limit(self) -> None:
        """Take note that a loop ran its last allowed step and did not end before."""
        self._has_hit_limit = True

    def show(self, name: str, values: np.ndarray, first: int, now_s: float) -> None:
        """Send values that are there to the sink, with the indices from `first` on."""
        if self._first_value_s is None:
            self._first_value_s = now_s
        if self._sink is not None:
            for index, value in enumerate(values, first):
                self._notify(CellPiece(name=name, value=value, index=index))

    def end(
        self,
        reason: FinishReason,
        values: Mapping[str, np.ndarray],
        now_s: float,
        error: JaxserveError | None = None,
    ) -> CellCompletion:
        """Resolve the future, if it is not, and return the completion."""
        if reason == "stop" and self._has_hit_limit:
            reason = "length"
        completion = CellCompletion(
            request_id=self.id,
            values=values,
            finish_reason=reason,
            timing=Timing(
                arrival_s=self._arrival_s,
                admitted_s=self._begun_s,
                first_token_s=self._first_value_s,
                finished_s=now_s,
            ),
            num_nodes=self._num_nodes,
            error=error,
        )
        with suppress(InvalidStateError):  # it was resolved before
            self.future.set_result(completion)
            self._notify(None)
        return completion

    def _notify(self, piece: CellPiece | None) -> None:
        if self._sink is None:
            return
        try:
            self._sink(piece)
        except Exception:  # a sink's error must not reach the engine
            _log.exception("the sink of %s failed; it gets no more pieces", self.id)
            self._sink = None


@final
class Part:
    """One graph of a request: the first, or one that a `then` returned.

    Attributes:
      key: its name in the scheduler; -1 before it has begun.
      first_row: id of its first row.
      before: the part before it, whose values it may take.
      num_slots: slots of each pool that are reserved for it while it has begun.
    """

    def __init__(self, answer: CellAnswer, graph: FlatGraph, before: Part | None = None):
        self.answer = answer
        self.graph = graph
        self.before = before
        self.key = -1
        self.first_row = 0
        self.num_slots = graph.num_slots
        returned = graph.plan.returned
        self._wanted = returned.wanted_for
        self._num_missing = returned.num_values
        self._values: dict[str, np.ndarray] = {}
        self._members: dict[str, list[np.ndarray | None]] = {
            name: [None] * num for name, num in returned.num_members.items()
        }
        self._steps: dict[str, list[np.ndarray]] = {name: [] for name in returned.steps}

    def start(self, key: int, first_row: int) -> None:
        self.key = key
        self.first_row = first_row

    def reserve(self, num_slots: tuple[int, ...]) -> None:
        """Take note of the slots that are reserved for it from now on."""
        self.num_slots = num_slots

    def detach(self) -> None:
        """Forget the part before it, whose values it does not take any more."""
        self.before = None

    def deliver(self, value: int, array: np.ndarray, now_s: float) -> None:
        """Take a value of the graph that it returns; a copy, since `array` may be a row of many."""
        array = array.copy()
        for wanted in self._wanted[value]:
            if wanted.is_steps:
                continue
            self._num_missing -= not self._has(wanted)
            if wanted.member is None:
                self._values[wanted.name] = array
            else:
                self._members[wanted.name][wanted.member] = array
            self.answer.show(wanted.name, array[None], wanted.member or 0, now_s)

    def deliver_steps(self, value: int, arrays: np.ndarray, now_s: float) -> None:
        """Take an emitted output of a loop's next steps, if the graph returns it.

        Args:
          arrays: [steps, ...], which nothing else changes.
        """
        for wanted in self._wanted.get(value, ()):
            if wanted.is_steps:
                steps = self._steps[wanted.name]
                first = sum(map(len, steps))
                steps.append(arrays)
                self.answer.show(wanted.name, arrays, first, now_s)

    def missing(self) -> list[int]:
        """Return the values that the graph returns and that have not been delivered."""
        if not self._num_missing:
            return []
        return [
            value
            for value, all_wanted in self._wanted.items()
            if not all(self._has(wanted) for wanted in all_wanted)
        ]

    def values(self) -> dict[str, np.ndarray]:
        """Return the values by name; lists that are not complete are left out."""
        found = dict(self._values)
        for name, members in self._members.items():
            arrays = [member for member in members if member is not None]
            if len(arrays) == len(members):
                found[name] = np.stack(arrays)
        for name, steps in self._steps.items():
            if steps:
                found[name] = np.concatenate(steps)
        return found

    def _has(self, wanted: Wanted) -> bool:
        if wanted.is_steps:
            return True
        if wanted.member is None:
            return wanted.name in self._values
        return self._members[wanted.name][wanted.member] is not None
