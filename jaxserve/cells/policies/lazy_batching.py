"""LazyBatching: batches that newer requests catch up with, under a latency target.

Choi, Kim and Rhu, HPCA 2021 (arXiv:2010.13103), from the paper's text; the authors published no
code. Their unit is a layer ("node") of a network; here it is a cell.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from jaxserve.cells.cell_graph import CellGraph
from jaxserve.cells.policy import CellType, Task, with_ended
from jaxserve.core.errors import InvalidConfigError


@final
@dataclass(frozen=True, kw_only=True)
class LazyBatching:
    """A stack of batches; only the newest one runs, until it can be merged with the one below it.

    - Requests of a batch advance together. A task has their ready nodes of the batch's type. When
      their types differ, the batch is split, and requests whose next node has less depth run first,
      so that they catch up.
    - A request that arrives begins a batch on top of the stack, between two tasks: the one below is
      preempted. Two batches next to each other whose next nodes are of one type are merged. Cells
      share their weights, so requests at different places of a sentence merge at once.
    - A request is admitted only if no request on the stack is expected to miss the target for it:
      the time until now, and the time of all cells that the stack and the new request have left,
      each as if it ran alone, are within `target_s`. That is the paper's conservative estimate of
      slack. A request that would miss the target in any case keeps none out. Requests that are not
      admitted wait, in order; on an empty stack the first is always admitted.
    - Of a loop, `expected_steps` are expected to run: the paper takes a high percentile of the
      lengths in training data.
    - A request leaves with its own last node.

    Attributes:
      target_s: the latency target of every request; the paper uses 100 ms.
      cell_s: seconds of one cell alone, by the name of its type.
      expected_steps: of a loop, if its `max_steps` is not lower.
    """

    target_s: float = 0.1
    cell_s: Mapping[str, float]
    expected_steps: int = 64
    name = "lazy_batching"

    def __post_init__(self) -> None:
        if not self.target_s > 0 or self.expected_steps < 1:
            raise InvalidConfigError(
                f"policy {self.name!r}: target_s={self.target_s} and expected_steps="
                f"{self.expected_steps} are not allowed; pass a target above 0 and at least 1 step"
            )

    def new_scheduler(self, types: Sequence[CellType], num_workers: int) -> LazyBatchingScheduler:
        missing = [type.name for type in types if type.name not in self.cell_s]
        if missing:
            raise InvalidConfigError(
                f"policy {self.name!r}: cell_s lacks {missing}; pass the seconds of every cell type"
            )
        return LazyBatchingScheduler(types, num_workers, self)


@final
@dataclass(eq=False, slots=True)
class _Request:
    """A graph that waits or runs.

    Attributes:
      left_s: seconds that its remaining cells are expected to take, each alone.
      num_left: for each node, its predecessors that have not been submitted, or ended if loops.
      num_running: nodes that have not run.
      steps_left: for each loop that has begun, the steps that have not been submitted.
    """

    key: int
    graph: CellGraph
    first: int
    deadline_s: float
    left_s: float
    num_left: list[int] = field(init=False)
    num_running: int = field(init=False)
    ready: dict[int, list[int]] = field(default_factory=dict)
    steps_left: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.num_left = [len(before) for before in self.graph.predecessors]
        self.num_running = len(self.graph)
        for node, num in enumerate(self.num_left):
            if num == 0:
                self.ready.setdefault(self.graph.types[node], []).append(node)

    @property
    def next(self) -> tuple[int, int] | None:
        """Depth and type of the next node; None while a loop's end is not known."""
        depths = self.graph.depths
        found = ((depths[nodes[0]], type) for type, nodes in self.ready.items() if nodes)
        return min(found, default=None)

    def release(self, node: int) -> None:
        """Record that a node has been submitted, or that a loop has ended."""
        for after in self.graph.successors[node]:
            self.num_left[after] -= 1
            if self.num_left[after] == 0:
                self.ready.setdefault(self.graph.types[after], []).append(after)


@final
@dataclass
class _StackedBatch:
    """Requests that advance together; the next nodes of all have this type."""

    type: int
    requests: dict[int, _Request]


@final
class LazyBatchingScheduler:
    """The `CellScheduler` of `LazyBatching`. Each worker has a stack; arrivals are shared."""

    wake_s = None

    def __init__(self, types: Sequence[CellType], num_workers: int, policy: LazyBatching):
        self._types = types
        self._target_s = policy.target_s
        self._cell_s = [policy.cell_s[type.name] for type in types]
        self._expected_steps = policy.expected_steps
        self._max_requests = max(type.max_batch for type in types)
        self._waiting: OrderedDict[int, _Request] = OrderedDict()
        self._stacks: list[list[_StackedBatch]] = [[] for _ in range(num_workers)]
        # Requests of each worker, including those that wait for the end of a loop.
        self._running: list[dict[int, _Request]] = [{} for _ in range(num_workers)]
        # For each worker: the nodes of each task in flight, with their requests.
        self._submitted: list[deque[list[tuple[_Request, list[int]]]]] = [
            deque() for _ in range(num_workers)
        ]

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or any(self._running)

    def add(self, key: int, graph: CellGraph, first_node: int, now_s: float) -> None:
        left_s = sum(
            self._cell_s[type] * self._steps(type, steps)
            for type, steps in zip(graph.types, graph.max_steps, strict=True)
        )
        self._waiting[key] = _Request(key, graph, first_node, now_s + self._target_s, left_s)

    def cancel(self, key: int) -> None:
        if self._waiting.pop(key, None) is not None:
            return
        for stack, running in zip(self._stacks, self._running, strict=True):
            if running.pop(key, None) is not None:
                self._unstack(stack, key)

    def schedule(self, worker: int, now_s: float) -> list[Task]:
        stack = self._stacks[worker]
        self._admit(worker, now_s)
        if not stack:
            return []
        batch = stack.pop()
        size = self._types[batch.type].max_batch
        nodes: list[int] = []
        members: list[tuple[_Request, list[int]]] = []
        for request in batch.requests.values():
            if len(nodes) == size:
                break
            some = request.ready[batch.type][: size - len(nodes)]
            nodes += [request.first + node for node in some]
            members.append((request, some))
        self._submitted[worker].append(members)
        for request, some in members:
            self._submit(request, batch.type, some)
        self._push(stack, list(batch.requests.values()))
        return [Task(batch.type, nodes, worker)]

    def complete(self, tasks: Sequence[Task], ended: Sequence[Collection[int]] = ()) -> list[int]:
        finished: list[int] = []
        for task, own in with_ended(tasks, ended):
            running = self._running[task.worker]
            for request, nodes in self._submitted[task.worker].popleft():
                if running.get(request.key) is not request:
                    continue
                if self._types[task.type].is_loop:
                    nodes = self._ended(request, task, nodes, own)
                request.num_running -= len(nodes)
                if request.num_running == 0:
                    del running[request.key]
                    finished.append(request.key)
        return finished

    def _steps(self, type: int, max_steps: int) -> int:
        return min(max_steps, self._expected_steps) if self._types[type].is_loop else 1

    def _admit(self, worker: int, now_s: float) -> None:
        """Put waiting requests on top of the stack, while all are expected to keep the target."""
        running, stack = self._running[worker], self._stacks[worker]
        if not self._waiting or len(running) >= self._max_requests:
            return
        total_s = sum(request.left_s for request in running.values())
        latest_s = _earliest(running.values(), now_s + total_s)
        new = []
        while self._waiting and len(running) < self._max_requests:
            request = next(iter(self._waiting.values()))
            end_s = now_s + total_s + request.left_s
            if running and end_s > latest_s:
                break
            del self._waiting[request.key]
            running[request.key] = request
            new.append(request)
            total_s += request.left_s
            if request.deadline_s >= end_s:
                latest_s = min(latest_s, request.deadline_s)
        if new:
            self._push(stack, new)

    def _push(self, stack: list[_StackedBatch], requests: Sequence[_Request]) -> None:
        groups: dict[int, tuple[int, dict[int, _Request]]] = {}
        for request in requests:
            if (following := request.next) is None:
                continue
            depth, type = following
            least, group = groups.get(type, (depth, {}))
            group[request.key] = request
            groups[type] = min(least, depth), group
        for type, (_, group) in sorted(groups.items(), key=lambda item: -item[1][0]):
            if stack and stack[-1].type == type:
                stack[-1].requests |= group
            else:
                stack.append(_StackedBatch(type, group))

    def _submit(self, request: _Request, type: int, nodes: list[int]) -> None:
        ready = request.ready[type]
        if not self._types[type].is_loop:
            del ready[: len(nodes)]
            request.left_s -= len(nodes) * self._cell_s[type]
            for node in nodes:
                request.release(node)
            return
        for node in nodes:
            left = request.steps_left.setdefault(node, request.graph.max_steps[node]) - 1
            request.steps_left[node] = left
            done = request.graph.max_steps[node] - left
            if done <= self._steps(type, request.graph.max_steps[node]):
                request.left_s -= self._cell_s[type]
            if left == 0:
                ready.remove(node)

    def _ended(
        self, request: _Request, task: Task, nodes: list[int], ended: Collection[int]
    ) -> list[int]:
        type, found = task.type, []
        for node in nodes:
            if node in request.ended:
                continue
            is_last = request.first + node in ended
            if is_last or (request.steps_left[node] == 0 and not self._in_flight(request, node)):
                found.append(node)
        for node in found:
            request.ended.add(node)
            if request.steps_left[node]:
                request.ready[type].remove(node)
                done = request.graph.max_steps[node] - request.steps_left[node]
                expected = self._steps(type, request.graph.max_steps[node])
                request.left_s -= max(0, expected - done) * self._cell_s[type]
            request.release(node)
        if found:
            stack = self._stacks[task.worker]
            self._unstack(stack, request.key)
            self._push(stack, [request])
        return found

    def _unstack(self, stack: list[_StackedBatch], key: int) -> None:
        for batch in stack:
            batch.requests.pop(key, None)
        stack[:] = [batch for batch in stack if batch.requests]

    def _in_flight(self, request: _Request, node: int) -> bool:
        return any(
            other is request and node in nodes
            for tasks in self._submitted
            for members in tasks
            for other, nodes in members
        )


def _earliest(requests: Collection[_Request], end_s: float) -> float:
    kept = (request.deadline_s for request in requests if request.deadline_s >= end_s)
    return min(kept, default=math.inf)
