"""BatchMaker's policy: batches of ready nodes of one type (thesis, 2.4.3, Algorithm 1)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import final

from jaxserve.cells.cell_graph import CellGraph
from jaxserve.cells.choice import choose
from jaxserve.cells.one_worker import OneWorkerScheduler
from jaxserve.cells.policy import CellScheduler, CellType, Task, with_ended
from jaxserve.core.errors import InvalidConfigError

_FREE = -1  # the worker of a subgraph that any worker may run
_SEVERAL = -2  # that of a subgraph that waits for tasks of several workers


@final
@dataclass(frozen=True, kw_only=True)
class BatchMaker:
    """Algorithm 1: types with full batches first, then idle types, then any; highest priority.

    Attributes:
      max_tasks_to_submit: most tasks of one type that are submitted together.
      releases_at_submission: whether a subgraph may run when the nodes before it have been
        submitted to one worker, where it then runs after them. Otherwise it waits until they have
        completed, as in the thesis; the worker may idle meanwhile.
    """

    max_tasks_to_submit: int = 5
    releases_at_submission: bool = True

    def __post_init__(self) -> None:
        if self.max_tasks_to_submit < 1:
            raise InvalidConfigError(
                f"max_tasks_to_submit={self.max_tasks_to_submit} is not allowed; pass at least 1"
            )

    @property
    def name(self) -> str:
        return "batchmaker"

    def new_scheduler(self, types: Sequence[CellType], num_workers: int) -> CellScheduler:
        if num_workers == 1 and self.releases_at_submission:
            return OneWorkerScheduler(types, self.max_tasks_to_submit)
        return BatchMakerScheduler(
            types, num_workers, self.max_tasks_to_submit, self.releases_at_submission
        )


class _Run:
    """A graph that has not left."""

    __slots__ = ("key", "graph", "first", "num_left", "dependencies", "subgraphs", "is_over")

    def __init__(self, key: int, graph: CellGraph, first: int):
        self.key = key
        self.graph = graph
        self.first = first
        self.num_left = len(graph)  # nodes that have not run
        # Of each node: the predecessors in its subgraph that have not been submitted.
        self.dependencies = list(graph.inner_dependencies)
        self.subgraphs: list[_Subgraph] = []
        self.is_over = False


class _Subgraph:
    """A subgraph of a run; on one worker, also all nodes of one entry of `CellGraph.starts`.

    Attributes:
      ready: numbers of the nodes that may be submitted now.
      num_open: nodes that have not been submitted; a loop counts until it has ended.
      num_before: edges from nodes of other subgraphs that do not allow it to run yet.
      num_running: tasks with its nodes, and nodes before it, that are submitted and not completed.
      worker: the worker of these; `_FREE` without any.
      place: its key in its type's queue, in the order of release; -1 outside of the queue.
      is_bound: whether it is a loop that has begun, whose state lies on its worker.
    """

    __slots__ = (
        *("run", "type", "ready", "num_open", "num_before", "num_running", "worker", "place"),
        *("steps_left", "is_bound", "is_ended"),
    )

    def __init__(self, run: _Run, type: int, ready: list[int], num_nodes: int, num_before: int):
        self.run = run
        self.type = type
        self.ready = ready
        self.num_open = num_nodes
        self.num_before = num_before
        self.num_running = 0
        self.worker = _FREE
        self.place = -1
        self.steps_left = 0
        self.is_bound = False
        self.is_ended = False


@final
class _Queue:
    """The released subgraphs of a type, which all have ready nodes.

    Attributes:
      num_ready: ready nodes of subgraphs that any worker may run.
      num_pinned: for each worker, ready nodes of the subgraphs that only it may run.
      num_running: submitted tasks that are not completed.
    """

    def __init__(self, type: CellType, num_workers: int):
        self.type = type
        self.subgraphs: OrderedDict[int, _Subgraph] = OrderedDict()
        self.num_ready = 0
        self.num_pinned = [0] * num_workers
        self.num_running = 0
        self._next_place = 0

    def num_for(self, worker: int) -> int:
        return self.num_ready + self.num_pinned[worker]

    def push(self, subgraph: _Subgraph) -> None:
        subgraph.place = self._next_place
        self._next_place += 1
        self.subgraphs[subgraph.place] = subgraph
        self.count(subgraph.worker, len(subgraph.ready))

    def remove(self, subgraph: _Subgraph) -> None:
        del self.subgraphs[subgraph.place]
        subgraph.place = -1
        self.count(subgraph.worker, -len(subgraph.ready))

    def count(self, worker: int, num: int) -> None:
        if worker < 0:
            self.num_ready += num
        else:
            self.num_pinned[worker] += num


@final
class BatchMakerScheduler:
    """See `CellScheduler` and `BatchMaker`. It serves any number of workers.

    `OneWorkerScheduler` returns the same tasks for one worker, in less time.
    """

    wake_s = None

    def __init__(
        self,
        types: Sequence[CellType],
        num_workers: int,
        max_tasks_to_submit: int,
        releases_at_submission: bool,
    ):
        self._queues = [_Queue(type, num_workers) for type in types]
        # Highest priority first; of equal ones, the first of the runtime's cells.
        self._by_priority = sorted(self._queues, key=lambda queue: -queue.type.priority)
        self._index = {id(queue): index for index, queue in enumerate(self._queues)}
        self._max_tasks = max_tasks_to_submit
        self._releases_early = releases_at_submission
        self._runs: dict[int, _Run] = {}
        # Of each worker: (task, [(subgraph, its nodes in the task)]) in the order of submission.
        self._submitted: list[deque[tuple[Task, list[tuple[_Subgraph, list[int]]]]]] = [
            deque() for _ in range(num_workers)
        ]

    @property
    def has_work(self) -> bool:
        return bool(self._runs)

    def add(self, key: int, graph: CellGraph, first_node: int, now_s: float) -> None:
        run = self._runs[key] = _Run(key, graph, first_node)
        for type, nodes in graph.starts:
            # One worker may take them together. With several, each is free to run on any.
            groups = [list(nodes)] if len(self._submitted) == 1 else [[node] for node in nodes]
            for group in groups:
                subgraph = _Subgraph(run, type, group, len(group), 0)
                run.subgraphs += [subgraph] * len(group)
                self._queues[type].push(subgraph)
        for spec in graph.later_subgraphs:
            subgraph = _Subgraph(
                run, spec.type, list(spec.first), len(spec.nodes), spec.num_dependencies
            )
            if self._queues[spec.type].type.is_loop:
                subgraph.steps_left = graph.max_steps[spec.nodes[0]]
            run.subgraphs.append(subgraph)
            if spec.num_dependencies == 0:
                self._queues[spec.type].push(subgraph)

    def cancel(self, key: int) -> None:
        run = self._runs.pop(key)
        run.is_over = True
        for subgraph in run.subgraphs:
            if subgraph.place >= 0:
                self._queues[subgraph.type].remove(subgraph)

    def schedule(self, worker: int, now_s: float) -> list[Task]:
        queue = choose(self._by_priority, worker)
        if queue is None:
            return []
        index = self._index[id(queue)]
        tasks: list[Task] = []
        while len(tasks) < self._max_tasks:
            nodes, members = _form_batch(queue, worker)
            if not nodes or (tasks and len(nodes) < queue.type.min_batch):
                break
            task = Task(index, nodes, worker)
            tasks.append(task)
            queue.num_running += 1
            self._submitted[worker].append((task, members))
            self._update(queue, members, worker)
        return tasks

    def complete(self, tasks: Sequence[Task], ended: Sequence[Collection[int]] = ()) -> list[int]:
        pairs = with_ended(tasks, ended)
        return [key for task, own in pairs for key in self._complete(task, own)]

    def _complete(self, task: Task, ended: Collection[int]) -> list[int]:
        submitted, members = self._submitted[task.worker].popleft()
        if submitted is not task:
            raise AssertionError("tasks of a worker must be completed in their order")
        queue = self._queues[task.type]
        queue.num_running -= 1
        is_loop = queue.type.is_loop
        finished: list[int] = []
        for subgraph, nodes in members:
            subgraph.num_running -= 1
            run = subgraph.run
            if run.is_over:
                continue
            if is_loop:
                nodes = self._loop_ended(subgraph, nodes, ended)
            if subgraph.num_running == 0:
                self._unpin(subgraph)
            if not nodes:
                continue
            run.num_left -= len(nodes)
            after = run.graph.outer_successors
            for node in nodes:
                for other in after[node]:
                    self._completed_before(run.subgraphs[other], is_loop)
            if run.num_left == 0:
                run.is_over = True
                del self._runs[run.key]
                finished.append(run.key)
        return finished

    def _update(
        self, queue: _Queue, members: list[tuple[_Subgraph, list[int]]], worker: int
    ) -> None:
        """Pin the subgraphs of a submitted task, and find the nodes that may follow in it."""
        num_taken = num_new = num_pinned = 0
        is_loop = queue.type.is_loop
        for subgraph, nodes in members:
            run, ready = subgraph.run, subgraph.ready
            num = len(nodes)
            if subgraph.worker != worker:  # it was free: its ready nodes are this worker's now
                num_pinned += len(ready)
                subgraph.worker = worker
            subgraph.num_running += 1
            num_taken += num
            if is_loop:
                subgraph.is_bound = True
                subgraph.steps_left -= 1
                if subgraph.steps_left:
                    num_new += 1
                    continue
            # Nodes that follow go before those that did not fit into the task.
            ready, rest = [], ready[num:]
            subgraph.num_open -= num
            if subgraph.num_open:
                dependencies, after = run.dependencies, run.graph.inner_successors
                for node in nodes:
                    for other in after[node]:
                        dependencies[other] -= 1
                        if dependencies[other] == 0:
                            ready.append(other)
                num_new += len(ready)
            ready += rest
            subgraph.ready = ready
            if self._releases_early and not is_loop:
                outer = run.graph.outer_successors
                for node in nodes:
                    for other in outer[node]:
                        self._submitted_before(run.subgraphs[other], worker)
            if not ready:
                del queue.subgraphs[subgraph.place]
                subgraph.place = -1
        queue.num_ready -= num_pinned
        queue.num_pinned[worker] += num_pinned - num_taken + num_new

    def _loop_ended(
        self, subgraph: _Subgraph, nodes: list[int], ended: Collection[int]
    ) -> list[int]:
        """Return the node of a loop if this step was its last one, and else none."""
        if subgraph.is_ended:
            return []
        if subgraph.run.first + nodes[0] not in ended and (
            subgraph.steps_left or subgraph.num_running
        ):
            return []
        subgraph.is_ended = True
        if subgraph.place >= 0:
            self._queues[subgraph.type].remove(subgraph)
        return nodes

    def _submitted_before(self, subgraph: _Subgraph, worker: int) -> None:
        """Take note that a node before a subgraph was submitted to a worker."""
        subgraph.num_running += 1
        if subgraph.worker == _FREE:
            subgraph.worker = worker
        elif subgraph.worker != worker:
            subgraph.worker = _SEVERAL
        subgraph.num_before -= 1
        if subgraph.num_before == 0 and subgraph.worker != _SEVERAL:
            self._queues[subgraph.type].push(subgraph)

    def _completed_before(self, subgraph: _Subgraph, is_loop: bool) -> None:
        """Take note that a node before a subgraph has run."""
        if self._releases_early and not is_loop:
            subgraph.num_running -= 1
            if subgraph.num_running == 0:
                was_waiting = subgraph.worker == _SEVERAL and subgraph.num_before == 0
                self._unpin(subgraph)
                if was_waiting:
                    self._queues[subgraph.type].push(subgraph)
            return
        subgraph.num_before -= 1
        if subgraph.num_before == 0 and subgraph.worker != _SEVERAL:
            self._queues[subgraph.type].push(subgraph)

    def _unpin(self, subgraph: _Subgraph) -> None:
        """Let any worker run a subgraph, unless it is a loop that has begun and not ended."""
        if subgraph.is_bound and not subgraph.is_ended:
            return
        if subgraph.place >= 0:
            queue = self._queues[subgraph.type]
            queue.count(subgraph.worker, -len(subgraph.ready))
            queue.count(_FREE, len(subgraph.ready))
        subgraph.worker = _FREE


def _form_batch(queue: _Queue, worker: int) -> tuple[list[int], list[tuple[_Subgraph, list[int]]]]:
    """Return ready nodes that a worker may run, at most a full batch, and whose they are."""
    room = queue.type.max_batch
    nodes: list[int] = []
    members: list[tuple[_Subgraph, list[int]]] = []
    for subgraph in queue.subgraphs.values():
        if subgraph.worker != worker and subgraph.worker != _FREE:
            continue
        ready, first = subgraph.ready, subgraph.run.first
        if len(ready) > room:
            ready = ready[:room]
        members.append((subgraph, ready))
        if len(ready) == 1:
            nodes.append(first + ready[0])
        else:
            nodes += [first + node for node in ready]
        room -= len(ready)
        if room == 0:
            break
    return nodes, members
