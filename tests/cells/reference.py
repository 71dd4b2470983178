"""Algorithm 1 of the thesis (2.4.3), node by node: slow, and as it is written there."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from jaxserve.cells.cell_graph import CellGraph
from jaxserve.cells.policy import CellType, Task


@dataclass(eq=False)
class _Subgraph:
    """Connected nodes of one type of a request, of which `ready` may be submitted.

    Attributes:
      edges_left: edges from other subgraphs that do not allow it to run yet.
      num_running: its nodes, and edges from nodes before it, that are submitted and not completed.
      worker: the worker of these; None for several.
      steps_left, has_begun: of a loop, whose state is on its worker once it has begun.
    """

    key: int
    type: int
    nodes: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    edges_left: int = 0
    num_running: int = 0
    worker: int | None = None
    steps_left: int = 0
    has_begun: bool = False
    is_released: bool = False
    is_ended: bool = False

    def pin(self, worker: int) -> None:
        """Count a node, or an edge from a node, that is submitted to a worker."""
        self.worker = worker if self.num_running == 0 or self.worker == worker else None
        self.num_running += 1

    def may_run_on(self, worker: int) -> bool:
        """Return whether it has ready nodes for a worker."""
        is_pinned = self.num_running > 0 or self.has_begun
        return bool(self.ready) and (self.worker == worker or not is_pinned)


class Reference:
    """A `CellScheduler` that decides as `BatchMakerScheduler` does."""

    wake_s = None

    def __init__(self, types: Sequence[CellType], num_workers: int, max_tasks: int, *, early: bool):
        self._types, self._max_tasks, self._early = types, max_tasks, early
        self._released: list[list[_Subgraph]] = [[] for _ in types]
        self._num_running = [0] * len(types)
        self._submitted: list[deque[Task]] = [deque() for _ in range(num_workers)]
        self._num_left: dict[int, int] = {}  # key -> nodes that have not run
        self._of: dict[int, _Subgraph] = {}  # by node, as all below
        self._inner: dict[int, list[int]] = {}
        self._outer: dict[int, list[int]] = {}
        self._num_inner: dict[int, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._num_left)

    def add(self, key: int, graph: CellGraph, first_node: int, now_s: float) -> None:
        self._num_left[key] = len(graph)
        subgraphs: dict[int, _Subgraph] = {}
        for number, head in enumerate(graph.links.heads.tolist()):
            node, type = first_node + number, graph.types[number]
            own = subgraphs.setdefault(head, _Subgraph(key, type))
            own.nodes.append(node)
            own.steps_left = graph.max_steps[number] if self._types[type].is_loop else 0
            before = [first_node + other for other in graph.predecessors[number]]
            inside = [other for other in before if self._of[other] is own]
            self._of[node] = own
            self._inner[node], self._outer[node] = [], []
            self._num_inner[node] = len(inside)
            own.edges_left += len(before) - len(inside)
            for other in before:
                (self._inner if other in inside else self._outer)[other].append(node)
            if not inside:
                own.ready.append(node)
        for is_start in (True, False):
            for own in subgraphs.values():
                if own.edges_left == 0 and (len(own.nodes) == 1 and not own.steps_left) == is_start:
                    self._release(own)

    def cancel(self, key: int) -> None:
        del self._num_left[key]
        for type, released in enumerate(self._released):
            self._released[type] = [one for one in released if one.key != key]

    def schedule(self, worker: int, now_s: float) -> list[Task]:
        type = self._choose(worker)
        tasks: list[Task] = []
        while type is not None and len(tasks) < self._max_tasks:
            nodes = self._ready(type, worker)[: self._types[type].max_batch]
            if not nodes or (tasks and len(nodes) < self._types[type].min_batch):
                break
            tasks.append(Task(type, nodes, worker))
            self._submitted[worker].append(tasks[-1])
            self._num_running[type] += 1
            self._submit(nodes, worker, is_loop=self._types[type].is_loop)
        return tasks

    def complete(self, tasks: Sequence[Task], ended: Sequence[Collection[int]] = ()) -> list[int]:
        finished = []
        for number, task in enumerate(tasks):
            assert self._submitted[task.worker].popleft().nodes == list(task.nodes)
            self._num_running[task.type] -= 1
            is_loop = self._types[task.type].is_loop
            for node in task.nodes:
                own = self._of[node]
                own.num_running -= 1
                if own.key not in self._num_left or own.is_ended:
                    continue
                if is_loop:
                    is_last = own.steps_left == 0 and own.num_running == 0
                    if not is_last and node not in (ended[number] if ended else ()):
                        continue
                    own.is_ended = True
                    self._released[own.type] = [o for o in self._released[own.type] if o is not own]
                for after in self._outer[node]:
                    self._completed_before(self._of[after], is_loop=is_loop)
                self._num_left[own.key] -= 1
                if self._num_left[own.key] == 0:
                    del self._num_left[own.key]
                    finished.append(own.key)
        return finished

    def _choose(self, worker: int) -> int | None:
        """Return the type of lines 5 to 10."""
        order = sorted(range(len(self._types)), key=lambda type: -self._types[type].priority)
        num = {type: len(self._ready(type, worker)) for type in order}
        full = [type for type in order if num[type] >= self._types[type].max_batch]
        idle = [type for type in order if num[type] and not self._num_running[type]]
        some = [type for type in order if num[type]]
        return next(iter(full or idle or some), None)

    def _ready(self, type: int, worker: int) -> list[int]:
        return [n for one in self._released[type] if one.may_run_on(worker) for n in one.ready]

    def _submit(self, nodes: list[int], worker: int, *, is_loop: bool) -> None:
        for own in dict.fromkeys([self._of[node] for node in nodes]):
            mine = [node for node in nodes if self._of[node] is own]
            for _ in mine:
                own.pin(worker)
            if is_loop:
                own.has_begun = True
                own.steps_left -= 1
                own.ready = own.ready if own.steps_left else []
                continue
            followers = []
            for node in mine:
                for after in self._inner[node]:
                    self._num_inner[after] -= 1
                    if self._num_inner[after] == 0:
                        followers.append(after)
            own.ready = followers + own.ready[len(mine) :]
        for node in nodes if self._early and not is_loop else ():
            for after in self._outer[node]:
                other = self._of[after]
                other.pin(worker)
                other.edges_left -= 1
                self._release_if_due(other)

    def _completed_before(self, other: _Subgraph, *, is_loop: bool) -> None:
        if self._early and not is_loop:
            other.num_running -= 1
        else:
            other.edges_left -= 1
        self._release_if_due(other)

    def _release_if_due(self, one: _Subgraph) -> None:
        waits_for_several = one.num_running > 0 and one.worker is None
        if one.edges_left == 0 and not one.is_released and not waits_for_several:
            self._release(one)

    def _release(self, one: _Subgraph) -> None:
        one.is_released = True
        self._released[one.type].append(one)
