"""Requests in a cell engine, and the parts of their graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias, final

import numpy as np

from jaxserve.cells.flat_graph import FlatGraph
from jaxserve.core.errors import JaxserveError
from jaxserve.core.request import FinishReason, Timing

_log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, kw_only=True)
class CellPiece:
    """A value of a request that is available before the request has ended.

    Attributes:
      name: name of the graph's output.
      value: the value; one step of `Node.steps`, or one member of a list.
      index: the number of the step or of the list's member; 0 for a single output.
    """

    name: str
    value: np.ndarray
    index: int = 0


CellSink: TypeAlias = "Callable[[CellPiece | None], None]"


@final
@dataclass(frozen=True, kw_only=True)
class CellCompletion:
    """The result of one request.

    Attributes:
      values: the values of the graph's outputs by name. A cancelled or failed request has those
        that were computed before it ended.
      finish_reason: "stop"; "length" if a loop reached its `max_steps`; "cancelled"; or "error",
        with the typed `error`.
      timing: `admitted_s` is when the call with its first task could run: at its submission, or at
        the end of the worker's previous call if that was later. `first_token_s` is when its first
        value was read.
      num_nodes: nodes of its graphs; a loop counts as one.
    """

    request_id: str
    values: Mapping[str, np.ndarray]
    finish_reason: FinishReason
    timing: Timing
    num_nodes: int
    error: JaxserveError | None = field(default=None, compare=False)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.values[name]


@final
class CellAnswer:
    """The answer to one request; its future is resolved exactly once, with a `CellCompletion`.

    Args:
      graph: the request's first graph.
      arrival_s: time of its submission on the engine's clock.
      sink: called with the pieces, and last with None, on the engine's thread. It must not block. A
        sink that raises is not called again.

    Attributes:
      begun_s: when the call with its first task could run; None before its submission.
      num_nodes: of the graphs that have started.
      has_hit_limit: whether a loop reached its `max_steps` without ending by itself.
    """

    def __init__(self, id: str, graph: FlatGraph, arrival_s: float, sink: CellSink | None = None):
        self.id = id
        self.graph = graph
        self.future: Future[CellCompletion] = Future()
        # A cancelled asyncio waiter cannot cancel the future.
        self.future.set_running_or_notify_cancel()
        self._sink = sink
        self._arrival_s = arrival_s
        self._first_value_s: float | None = None
        self.begun_s: float | None = None
        self.num_nodes = 0
        self.has_hit_limit = False

    def show(self, name: str, values: np.ndarray, first: int, now_s: float) -> None:
        """Send values to the sink, with the indices from `first` on."""
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
        """Return the completion, and resolve the future with it unless it is already resolved."""
        if reason == "stop" and self.has_hit_limit:
            reason = "length"
        completion = CellCompletion(
            request_id=self.id,
            values=values,
            finish_reason=reason,
            timing=Timing(
                arrival_s=self._arrival_s,
                admitted_s=self.begun_s,
                first_token_s=self._first_value_s,
                finished_s=now_s,
            ),
            num_nodes=self.num_nodes,
            error=error,
        )
        with suppress(InvalidStateError):  # already resolved
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
class GraphRun:
    """One graph of a request: the first, or one that a `then` returned.

    Its `key` names it in the scheduler (-1 before it has begun). `num_slots` of each pool are
    reserved for it while it runs. It may take the values of the part `before` it.
    """

    def __init__(self, answer: CellAnswer, graph: FlatGraph, before: GraphRun | None = None):
        self.answer = answer
        self.graph = graph
        self.before = before
        self.key = -1
        self.first_row = 0
        self.num_slots = graph.num_slots
        self._returned = graph.plan.returned
        self._arrays: dict[int, np.ndarray] = {}  # by value
        self._steps: dict[int, list[np.ndarray]] = {}  # likewise, of loops

    def deliver(self, value: int, array: np.ndarray, now_s: float) -> None:
        """Copy a value that the graph returns; `array` may be a view of a larger array."""
        array = self._arrays[value] = array.copy()
        for wanted in self._returned.wanted_for[value]:
            if not wanted.is_steps:
                self.answer.show(wanted.name, array[None], wanted.member or 0, now_s)

    def deliver_steps(self, value: int, arrays: np.ndarray, now_s: float) -> None:
        """Take a loop's next steps [steps, ...] of an emitted output; no other code changes it."""
        for wanted in self._returned.wanted_for.get(value, ()):
            if wanted.is_steps:
                steps = self._steps.setdefault(value, [])
                self.answer.show(wanted.name, arrays, sum(map(len, steps)), now_s)
                steps.append(arrays)

    def missing(self) -> list[int]:
        if len(self._arrays) == len(self._returned.values):
            return []
        return [value for value in self._returned.values if value not in self._arrays]

    def values(self) -> dict[str, np.ndarray]:
        """Return the values by name, without incomplete lists."""
        found: dict[str, np.ndarray] = {}
        lists: dict[str, list[np.ndarray | None]] = {}
        for value, wanted in self.graph.wanted:
            if wanted.is_steps:
                if value in self._steps:
                    found[wanted.name] = np.concatenate(self._steps[value])
            elif wanted.member is not None:
                lists.setdefault(wanted.name, []).append(self._arrays.get(value))
            elif value in self._arrays:
                found[wanted.name] = self._arrays[value]
        for name, members in lists.items():
            arrays = [one for one in members if one is not None]
            if len(arrays) == len(members):
                found[name] = np.stack(arrays)
        return found


@final
class RowOwners:
    """The part that owns each row, and whether its request has begun."""

    def __init__(self) -> None:
        self._part_of: list[GraphRun | None] = []
        # Whether each row belongs to a request without a submitted task.
        self._has_not_begun = np.zeros(0, np.bool_)

    def __getitem__(self, row: int) -> GraphRun | None:
        return self._part_of[row]

    def add(self, part: GraphRun, num_rows: int) -> None:
        num_new = num_rows - len(self._part_of)
        if num_new > 0:
            self._part_of += [None] * num_new
            self._has_not_begun = np.append(self._has_not_begun, np.zeros(num_new, np.bool_))
        num = part.graph.num_nodes
        self._part_of[part.first_row : part.first_row + num] = [part] * num
        self._mark(part, part.answer.begun_s is None)

    def remove(self, part: GraphRun) -> None:
        num = part.graph.num_nodes
        self._part_of[part.first_row : part.first_row + num] = [None] * num
        if part.answer.begun_s is None:
            self._mark(part, False)

    def begin(self, rows: np.ndarray) -> list[GraphRun]:
        new = rows[self._has_not_begun[rows]].tolist()
        found = [part for part in dict.fromkeys(map(self._part_of.__getitem__, new)) if part]
        for part in found:
            self._mark(part, False)
        return found

    def parts(self) -> list[GraphRun]:
        return [part for part in dict.fromkeys(self._part_of) if part is not None]

    def _mark(self, part: GraphRun, has_not_begun: bool) -> None:
        end = part.first_row + part.graph.num_nodes
        self._has_not_begun[part.first_row : end] = has_not_begun
