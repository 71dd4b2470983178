"""The host loop of cells: admit graphs, schedule tasks, submit them, collect their results."""

from __future__ import annotations

import operator
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from jaxserve.cells.answers import CellAnswer, CellCompletion, GraphRun, RowOwners
from jaxserve.cells.executor import CellExecutor, CellHandle, TaskResults
from jaxserve.cells.flat_graph import FlatGraph, flatten
from jaxserve.cells.graph import Graph
from jaxserve.cells.layout import CellLayout
from jaxserve.cells.policy import CellPolicy, TaskGroup
from jaxserve.cells.recorder import CellRecorder
from jaxserve.core.clock import Clock
from jaxserve.core.errors import (
    DeviceMemoryError,
    InvalidGraphError,
    JaxserveError,
    NumericalError,
    TooManyNodesError,
    UnfoldError,
)
from jaxserve.core.request import FinishReason
from jaxserve.engine.loop import EngineBase


@final
@dataclass
class CellStats:
    """Counters since the start.

    Attributes:
      num_tasks, num_calls: tasks, and calls of executables that ran them; a call runs several tasks
        of one type and size.
      num_nodes: nodes in tasks; a loop's node counts in each of its steps.
      num_padding: rows of tasks without a node.
      scheduling_s: seconds that the policy took.
      submitting_s: seconds that the executor took to submit tasks.
    """

    num_tasks: int = 0
    num_calls: int = 0
    num_nodes: int = 0
    num_padding: int = 0
    scheduling_s: float = 0.0
    submitting_s: float = 0.0


def _no_free_slots(part: GraphRun) -> DeviceMemoryError:
    return DeviceMemoryError(
        f"request {part.answer.id}: its next graph needs more slots than are free, and all others "
        "are kept by requests whose `then` returned further graphs; pass more slot_memory, or "
        "submit fewer at a time"
    )


def _not_finite(part: GraphRun, node: int, layout: CellLayout) -> NumericalError:
    number = node - part.first_row
    cell = layout.types[part.graph.graph.types[number]].cell
    return NumericalError(
        f"request {part.answer.id}: node {number} (cell {cell.name!r}) returned NaN or infinite "
        "values; check the input and the cell's parameters, or pass allows_infinite to its Cell if "
        "infinity is meant"
    )


def _policy_failed(policy: str, cause: Exception) -> InvalidGraphError:
    refused = InvalidGraphError(
        f"the policy {policy!r} raised {type(cause).__name__} for the graph: {cause}; pass a graph "
        "that it schedules, or another policy"
    )
    refused.__cause__ = cause
    return refused


def _not_scheduled(part: GraphRun, policy: str) -> InvalidGraphError:
    return InvalidGraphError(
        f"request {part.answer.id}: the policy {policy!r} schedules none of the nodes that are "
        "left, and nothing else runs; pass a graph that it schedules, or another policy"
    )


def _then_failed(part: GraphRun, cause: Exception) -> UnfoldError:
    failure = UnfoldError(
        f"request {part.answer.id}: its `then` raised {type(cause).__name__}: {cause}; it must "
        "return a Graph or the values"
    )
    failure.__cause__ = cause
    return failure


def _range_size(num: int) -> int:
    return max(8, 1 << (num - 1).bit_length())


@final
@dataclass
class _Lane:
    """The submitted and not collected calls of one worker, each with whether it ends its group."""

    handles: deque[tuple[CellHandle, bool]] = field(default_factory=deque)
    num_groups: int = 0
    num_submitted: int = 0
    num_collected: int = 0


@final
class Lanes:
    """The tasks in flight, at most `max_in_flight` groups for each worker, and the ids of rows.

    Ids are below `num_rows`, and are taken in ranges of powers of two.
    """

    def __init__(self, num_workers: int, max_in_flight: int, clock: Clock):
        self._lanes = [_Lane() for _ in range(num_workers)]
        self._max_in_flight = max_in_flight
        self._clock = clock
        self.num_rows = 0
        self._free: dict[int, list[int]] = {}  # size -> first ids of free ranges
        # Ranges of ids that tasks in flight may name: (handles submitted before, first, number).
        self._limbo: deque[tuple[list[int], int, int]] = deque()

    @property
    def is_at_work(self) -> bool:
        return any(lane.handles for lane in self._lanes)

    def open_workers(self, among: Collection[int] | None = None) -> list[int]:
        """Return the workers, all or `among`, that may be given another group, least loaded first.

        Workers are ordered by their groups in flight, then by the calls given to them so far.
        """
        found = [
            (lane.num_groups, lane.num_submitted, worker)
            for worker, lane in enumerate(self._lanes)
            if lane.num_groups < self._max_in_flight and (among is None or worker in among)
        ]
        return [worker for *_, worker in sorted(found)]

    def has_run(self, worker: int) -> bool:
        handles = self._lanes[worker].handles
        return bool(handles) and handles[-1][0].is_ready()

    def has_news(self, worker: int) -> bool:
        """Return whether a request may wait for the results of a worker's newest tasks."""
        return self._lanes[worker].handles[-1][0].has_news

    @property
    def is_any_ready(self) -> bool:
        oldest = [lane.handles[0][0] for lane in self._lanes if lane.handles]
        return any([handle.is_ready() for handle in oldest])

    def push(self, worker: int, handles: list[CellHandle], *, is_group: bool = True) -> None:
        """Add the calls of a group of tasks, or a handle without tasks."""
        lane = self._lanes[worker]
        lane.handles += [(handle, is_group and handle is handles[-1]) for handle in handles]
        lane.num_groups += is_group
        lane.num_submitted += len(handles)

    def pop_ready(self) -> tuple[int, CellHandle] | None:
        """Remove the oldest handle of a worker that is ready, and return the worker and the handle.

        With one worker the handle may not be ready; its `collect` waits. With several workers, wait
        briefly if one of them may be given more tasks, so that a request that arrives does not wait
        for another worker's task; return None if no handle becomes ready.
        """
        if len(self._lanes) == 1:
            return self._pop(0)
        while (found := self._pop_if_ready()) is None:
            self._clock.wait()
            if self.open_workers():
                return self._pop_if_ready()
        return found

    def _pop_if_ready(self) -> tuple[int, CellHandle] | None:
        for worker, lane in enumerate(self._lanes):
            if lane.handles and lane.handles[0][0].is_ready():
                return self._pop(worker)
        return None

    def _pop(self, worker: int) -> tuple[int, CellHandle]:
        lane = self._lanes[worker]
        handle, ends_group = lane.handles.popleft()
        lane.num_groups -= ends_group
        lane.num_collected += 1
        return worker, handle

    def clear(self) -> None:
        for lane in self._lanes:
            lane.handles.clear()

    def take_rows(self, num: int) -> int:
        """Return the first of consecutive ids that no task in flight names."""
        size = _range_size(num)
        free = self._free.get(size)
        if free:
            return free.pop()
        self.num_rows += size
        return self.num_rows - size

    def free_rows(self, first: int, num: int) -> None:
        """Free ids, which are reused when the tasks that are now in flight have been collected."""
        self._limbo.append(([lane.num_submitted for lane in self._lanes], first, num))

    def forget_rows(self) -> list[range]:
        """Return the freed ids that no task in flight names any longer, each once."""
        found = []
        last: list[int] = []  # numbers of handles that have been collected
        while self._limbo:
            submitted, first, num = self._limbo[0]
            if submitted != last:
                pairs = zip(self._lanes, submitted, strict=True)
                if any([lane.num_collected < until for lane, until in pairs]):
                    break
                last = submitted
            self._limbo.popleft()
            self._free.setdefault(_range_size(num), []).append(first)
            found.append(range(first, first + num))
        return found


@final
class CellEngine(EngineBase[CellAnswer]):
    """Runs graphs of cells with a policy's tasks. It is not thread-safe: one loop owns it.

    Args:
      max_in_flight: groups of tasks that are submitted to a worker and not collected; 2 keeps the
        device busy while the host schedules.
      max_nodes: the most nodes of a graph that a `then` returns.
      max_admitted: how many graphs are started before the host checks whether the device is idle
        and submits tasks; None for all waiting graphs.
    """

    memory_remedy = "pass a smaller slot_memory or smaller batch_sizes"

    def __init__(
        self,
        executor: CellExecutor,
        policy: CellPolicy,
        clock: Clock,
        *,
        max_in_flight: int = 2,
        max_nodes: int,
        max_admitted: int | None = None,
    ):
        self.changed = threading.Condition()
        self.stats = CellStats()
        self.recorder = CellRecorder(executor.layout, executor.num_workers)
        self._executor = executor
        self._layout = executor.layout
        self._clock = clock
        self._max_nodes = max_nodes
        self._max_admitted = max_admitted
        self._policy_name = policy.name
        self._scheduler = policy.new_scheduler(self._layout.cell_types, executor.num_workers)
        self._lanes = Lanes(executor.num_workers, max_in_flight, clock)
        self._rows = RowOwners()
        self._free_slots = list(executor.num_slots)
        self._waiting: deque[GraphRun] = deque()
        self._parts: dict[int, GraphRun] = {}  # parts in the scheduler
        # Parts that have left the scheduler and wait for the last values of loops.
        self._reading: dict[int, GraphRun] = {}
        self._of_request: dict[str, GraphRun] = {}  # the last part of each request
        self._ended_loops: set[int] = set()
        # Id of a handle in flight -> the requests that begin with it.
        self._begun: dict[int, list[CellAnswer]] = {}
        self._ended_s = [0.0] * executor.num_workers  # worker -> end of its last tasks
        self._next_key = 0
        self._ended: list[CellCompletion] = []

    @property
    def has_work(self) -> bool:
        return bool(self._of_request) or self._lanes.is_at_work

    @property
    def idle_until_s(self) -> float | None:
        """The time until which the loop may idle, while the policy waits for more requests."""
        return None if self._lanes.is_at_work or self._waiting else self._scheduler.wake_s

    def begin(self, job: CellAnswer) -> None:
        """Add a request; its graph starts when there are slots for its values, in order."""
        part = GraphRun(job, job.graph)
        self._of_request[job.id] = part
        self._waiting.append(part)

    def cancel(self, id: str) -> None:
        """End a request with the values that it has; do nothing if it is unknown."""
        part = self._of_request.get(id)
        if part is not None:
            self._end(part, "cancelled")

    def step(self) -> list[CellCompletion]:
        """Submit the policy's tasks, collect the oldest ones if due, and return ended requests."""
        may_admit = self._admit()
        has_submitted = has_run = False
        workers = self._lanes.open_workers()
        while workers := [worker for worker in workers if self._submit(worker)]:  # a group each
            has_submitted = True
            # More tasks ahead gain nothing if a CPU has run these and a request waits for the
            # results. Requests that wait to start may join the next tasks.
            done = [worker for worker in workers if self._lanes.has_run(worker)]
            has_run |= bool(done)
            left = set(workers) - set(filter(self._lanes.has_news, done))
            workers = [] if may_admit else self._lanes.open_workers(left)
        if self._lanes.is_at_work:
            if has_run or not (has_submitted and self._lanes.open_workers()):
                self._collect()
            while has_run and self._lanes.is_any_ready:
                self._collect()
        elif not may_admit:
            self._check_progress()
        ended, self._ended = self._ended, []
        return ended

    def check_integrity(self) -> None:
        """Check that slots and requests are consistent, for tests; raises AssertionError."""
        self._executor.check_integrity()
        parts = self._rows.parts()
        for pool, num in enumerate(self._executor.num_slots):
            taken = sum(part.num_slots[pool] for part in parts)
            assert self._free_slots[pool] + taken == num, (
                f"pool {pool}: {taken} slots are reserved, and {self._free_slots[pool]} are free"
            )
        assert self._scheduler.has_work == bool(self._parts), "the scheduler has other graphs"

    def cancel_all(self) -> None:
        for request_id in list(self._of_request):
            self.cancel(request_id)

    def fail_all(self, error: JaxserveError, not_begun: Sequence[CellAnswer]) -> None:
        now_s = self._clock.now()
        for part in self._of_request.values():
            part.answer.end("error", part.values(), now_s, error)
        for answer in not_begun:
            answer.end("error", {}, now_s, error)
        self._of_request.clear()
        self._waiting.clear()
        self._lanes.clear()

    # ---- submission ----

    def _admit(self) -> bool:
        """Start waiting graphs in order, or only some if the device would idle.

        Return whether more could be started now.
        """
        num_admitted = 0
        while self._waiting:
            if num_admitted == self._max_admitted:
                if not self._lanes.is_at_work or self._lanes.is_any_ready:
                    return True
                num_admitted = 0
            part = self._waiting[0]
            graph = part.graph
            num_nodes = graph.num_nodes
            if not self._has_room(part):
                refusal = self.refusal(graph.num_slots)
                if refusal is not None:
                    self._end(part, "error", refusal)
                    continue
                return False
            first_row = self._lanes.take_rows(num_nodes)
            refused = self._schedule(graph, first_row)
            if refused is not None:
                self._lanes.free_rows(first_row, num_nodes)
                self._end(part, "error", refused)
                continue
            self._waiting.popleft()
            self._take_slots(graph.num_slots, 1)
            part.key, part.first_row = self._next_key, first_row
            self._rows.add(part, self._lanes.num_rows)
            self._next_key += 1
            self._parts[part.key] = part
            kept_row = 0 if part.before is None else part.before.first_row
            self._executor.add(graph, first_row, kept_row)
            part.answer.num_nodes += num_nodes
            num_admitted += 1
        return False

    def _has_room(self, part: GraphRun) -> bool:
        """Return whether a part may begin.

        The first graph of a request that may have more leaves room for another one of its size, so
        that one request can continue when all wait with the values that they keep.
        """
        free, num_slots = self._free_slots, part.graph.num_slots
        if part.before is None and part.graph.then is not None:
            if any(map(operator.lt, free, self._executor.num_slots)):
                num_slots = [2 * num for num in num_slots]
        return not any(map(operator.gt, num_slots, free))

    def _take_slots(self, num_slots: Sequence[int], sign: int) -> None:
        """Take slots of each pool, or free them with the sign -1."""
        for pool, num in enumerate(num_slots):
            self._free_slots[pool] -= sign * num

    def _schedule(self, graph: FlatGraph, first_row: int) -> JaxserveError | None:
        """Add a graph to the scheduler under the next key; return an error if it is refused."""
        try:
            self._scheduler.add(self._next_key, graph.graph, first_row, self._clock.now())
        except JaxserveError as error:
            return error
        except Exception as error:
            return _policy_failed(self._policy_name, error)
        return None

    def refusal(self, num_slots: Sequence[int]) -> TooManyNodesError | None:
        """Return the error for a graph that could never be admitted, or None; thread-safe."""
        allowed = self._executor.num_slots
        for spec, needed, most in zip(self._layout.pools, num_slots, allowed, strict=True):
            if needed > most:
                return TooManyNodesError(
                    f"the graph may have {needed} live values {spec}, and a device has {most} "
                    "slots for them; pass a shorter input, or create the runtime with more "
                    "slot_memory"
                )
        return None

    def _submit(self, worker: int) -> bool:
        begin_s = time.perf_counter()
        tasks = self._scheduler.schedule(worker, self._clock.now())
        scheduled_s = time.perf_counter()
        if not tasks:
            return False
        now_s = self._clock.now()
        handles = self._executor.submit(worker, tasks)
        self._lanes.push(worker, handles)
        stats = self.stats
        stats.num_calls += len(handles)
        stats.scheduling_s += scheduled_s - begin_s
        stats.submitting_s += time.perf_counter() - scheduled_s
        for handle in handles:
            assert handle.tasks is not None
            begun = self._begin(handle.tasks, now_s)
            if begun:
                self._begun[id(handle)] = begun
        return True

    def _begin(self, tasks: TaskGroup, now_s: float) -> list[CellAnswer]:
        """Record the tasks of a submitted call; return the requests that begin with it."""
        begun = [part.answer for part in self._rows.begin(tasks.array)]
        for answer in begun:
            answer.begun_s = now_s
        self.stats.num_tasks += len(tasks)
        self.stats.num_nodes += len(tasks.array)
        self.stats.num_padding += self.recorder.submitted(tasks, now_s, len(self._of_request))
        return begun

    def _check_progress(self) -> None:
        """End the oldest request that the policy never schedules, or the newest without slots."""
        if self._scheduler.has_work:
            if self._scheduler.wake_s is None:
                part = next(iter(self._parts.values()))
                self._end(part, "error", _not_scheduled(part, self._policy_name))
        elif self._waiting:
            part = next((p for p in self._waiting if p.before is not None), self._waiting[0])
            self._end(part, "error", _no_free_slots(part))

    # ---- results ----

    def _collect(self) -> None:
        found = self._lanes.pop_ready()
        if found is not None:
            self._apply(*found)

    def _apply(self, worker: int, handle: CellHandle) -> None:
        results = handle.collect()
        now_s = self._clock.now()
        for answer in self._begun.pop(id(handle), ()):
            answer.begun_s = max(answer.begun_s or 0.0, self._ended_s[worker])
        self._ended_s[worker] = now_s
        self._deliver(results, now_s)
        for node in results.not_finite:
            part = self._rows[node]
            if part is not None:
                self._end(part, "error", _not_finite(part, node, self._layout))
        finished: list[int] = []
        if handle.tasks is not None:
            self.recorder.collected(worker, now_s)
            self._ended_loops.update(*results.ended)
            finished = self._scheduler.complete(handle.tasks, results.ended)
        for key in finished:
            part = self._parts.pop(key)
            missing = part.missing()
            if missing:  # the last values of loops, whose ends are known now
                self._reading[key] = part
                values = [value + part.first_row * self._layout.stride for value in missing]
                self._lanes.push(worker, [self._executor.read(worker, values)], is_group=False)
            else:
                self._finish(part)
        for rows in self._lanes.forget_rows():
            if self._ended_loops:
                self._ended_loops.difference_update(rows)

    def _deliver(self, results: TaskResults, now_s: float) -> None:
        stride = self._layout.stride
        for value, arrays in results.steps:
            part = self._rows[value // stride]
            if part is not None:
                part.deliver_steps(value - part.first_row * stride, arrays, now_s)
        for value, array in results.values:
            part = self._rows[value // stride]
            if part is not None:
                part.deliver(value - part.first_row * stride, array, now_s)
                if part.key in self._reading and not part.missing():
                    del self._reading[part.key]
                    self._finish(part)

    def _finish(self, part: GraphRun) -> None:
        first_row, graph = part.first_row, part.graph
        for node in graph.plan.loops:
            cell = self._layout.types[graph.graph.types[node]].cell
            if cell.ends_by_itself and first_row + node not in self._ended_loops:
                part.answer.has_hit_limit = True
        if part.before is not None:
            self._remove(part.before)
            part.before = None
        values = part.values()
        if graph.then is None:
            self._end(part, "stop", values=values)
            return
        try:
            after = graph.then(values)
            if not isinstance(after, Graph):
                final_values = {name: np.asarray(value) for name, value in after.items()}
                self._end(part, "stop", values=final_values)
                return
            flat = flatten(after, self._layout, max_nodes=self._max_nodes, kept=graph.keep)
        except JaxserveError as error:
            self._end(part, "error", error)
            return
        except Exception as error:
            self._end(part, "error", _then_failed(part, error))
            return
        self._shrink(part, flat.kept)
        follower = GraphRun(part.answer, flat, part)
        self._of_request[part.answer.id] = follower
        self._waiting.appendleft(follower)

    def _end(
        self,
        part: GraphRun,
        reason: FinishReason,
        error: JaxserveError | None = None,
        *,
        values: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        now_s = self._clock.now()
        answer = part.answer
        if part.key < 0:
            self._waiting.remove(part)
        else:
            if self._parts.pop(part.key, None) is not None:
                self._scheduler.cancel(part.key)
            self._reading.pop(part.key, None)
            self._remove(part)
        if part.before is not None:
            self._remove(part.before)
        del self._of_request[answer.id]
        shown = part.values() if values is None else values
        completion = answer.end(reason, shown, now_s, error)
        self.recorder.request_ended(completion)
        self._ended.append(completion)

    def _shrink(self, part: GraphRun, kept: Sequence[int]) -> None:
        graph = part.graph
        pools = [graph.pool_of(value, self._layout) for value in kept]
        num_slots = tuple(pools.count(pool) for pool in range(len(graph.num_slots)))
        self._executor.shrink(graph, part.first_row, kept)
        self._take_slots(part.num_slots, -1)
        self._take_slots(num_slots, 1)
        part.num_slots = num_slots

    def _remove(self, part: GraphRun) -> None:
        """Drop a part's values now, and its ids when no task in flight names them."""
        graph, first = part.graph, part.first_row
        self._executor.remove(graph, first)
        self._take_slots(part.num_slots, -1)
        self._rows.remove(part)
        self._lanes.free_rows(first, graph.num_nodes)
