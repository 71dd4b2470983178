"""Graph batching: a batch of whole graphs runs to its end before the next one begins.

Systems of this kind differ in the graphs that form a batch (`Buckets`), and in the tasks that a
batch becomes (`Merge`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from jaxserve.cells.cell_graph import CellGraph
from jaxserve.cells.policy import CellType, Task, with_ended
from jaxserve.core.errors import InvalidConfigError


@final
@dataclass(eq=False, slots=True)
class Member:
    """A graph that waits or runs; its nodes have the ids from `first` on."""

    key: int
    graph: CellGraph
    first: int
    is_cancelled: bool = False


# Members of a batch -> its tasks in order, whose worker is chosen later. Of a loop, one task is all
# steps.
Merge: TypeAlias = "Callable[[Sequence[Member], Sequence[CellType]], Iterable[Task]]"
# Graph -> its bucket; only graphs of one bucket share a batch.
BucketOf: TypeAlias = "Callable[[CellGraph], Hashable]"


@final
class Buckets:
    """Waiting graphs, by bucket, first come, first served; a batch has at most `max_graphs`.

    `bucket_of` returns a graph's bucket. Buckets take turns in their order with `is_round_robin`
    (thesis, 2.7.1). Otherwise the one whose first graph has waited longest is next.
    """

    def __init__(self, bucket_of: BucketOf, max_graphs: int, *, is_round_robin: bool):
        self._bucket_of = bucket_of
        self._max_graphs = max_graphs
        self._is_round_robin = is_round_robin
        self._waiting: dict[Hashable, OrderedDict[int, Member]] = {}
        self._last: Hashable = None

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, member: Member) -> None:
        bucket = self._bucket_of(member.graph)
        self._waiting.setdefault(bucket, OrderedDict())[member.key] = member

    def remove(self, key: int) -> bool:
        for bucket, waiting in self._waiting.items():
            if waiting.pop(key, None) is not None:
                if not waiting:
                    del self._waiting[bucket]
                return True
        return False

    def take(self) -> list[Member]:
        if not self._waiting:
            return []
        bucket = self._last = self._next()
        waiting = self._waiting[bucket]
        taken = [waiting.popitem(last=False)[1] for _ in range(min(len(waiting), self._max_graphs))]
        if not waiting:
            del self._waiting[bucket]
        return taken

    def _next(self) -> Hashable:
        if not self._is_round_robin:
            # Keys of graphs rise with their arrivals.
            return min(self._waiting, key=lambda bucket: next(iter(self._waiting[bucket])))
        order: list[Any] = list(self._waiting)
        order.sort()
        last = self._last
        return next((bucket for bucket in order if last is not None and bucket > last), order[0])


@final
@dataclass
class _Loop:
    """A loop of a batch that has begun with `num_rows` rows, of which a step may be submitted.

    `steps_left` has, for every row that has not ended, the steps that have not been submitted.
    """

    type: int
    steps_left: dict[int, int]
    num_rows: int
    has_begun: bool = False

    def drop(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            self.steps_left.pop(node, None)


@final
@dataclass
class _Batch:
    """The batch of a worker: the tasks that have not been submitted, and its open ones."""

    members: list[Member]
    tasks: deque[Task]
    loop: _Loop | None = None
    num_open: int = 0
    last_type: int = 0
    cancelled: set[int] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        return not self.tasks and self.loop is None and self.num_open == 0


@final
class GraphBatchScheduler:
    """A `CellScheduler` in which a worker takes the next batch when its last one has completed.

    All requests of a batch leave together, at its end. A request that is cancelled while it runs
    stays as padding, since its graph is a part of the merged one.

    A step of a loop is submitted when the previous one has completed, so none runs after the last
    row has ended. The loops of the compared frameworks do the same on the host, or decide it on the
    device. On a device the worker waits for the host between two steps.

    Args:
      keeps_rows: whether a loop computes ended rows until the last one ends.
    """

    wake_s = None

    def __init__(
        self,
        types: Sequence[CellType],
        num_workers: int,
        waiting: Buckets,
        merge: Merge,
        *,
        keeps_rows: bool = False,
    ):
        self._types = types
        self._keeps_rows = keeps_rows
        self._waiting = waiting
        self._merge = merge
        self._running: list[_Batch | None] = [None] * num_workers

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or any(batch is not None for batch in self._running)

    def add(self, key: int, graph: CellGraph, first_node: int, now_s: float) -> None:
        self._waiting.add(Member(key, graph, first_node))

    def cancel(self, key: int) -> None:
        if self._waiting.remove(key):
            return
        for worker, batch in enumerate(self._running):
            for member in batch.members if batch is not None else ():
                if member.key == key and batch is not None:
                    self._cancel(worker, batch, member)
                    return

    def schedule(self, worker: int, now_s: float) -> list[Task]:
        batch = self._running[worker] or self._next_batch(worker)
        if batch is None:
            return []
        tasks: list[Task] = []
        while batch.tasks and batch.loop is None:
            task = batch.tasks.popleft()
            if self._types[task.type].is_loop:
                batch.loop = self._begun(batch, task)
            else:
                tasks.append(_living(batch, task, worker))
        if batch.loop is not None:
            tasks += self._iteration(batch, batch.loop, worker)
        if not tasks and batch.num_open == 0:
            # Only cancelled rows were left: the other rows leave with a task of padding.
            batch.loop = None
            tasks.append(Task(batch.last_type, (), worker, 1))
        batch.num_open += len(tasks)
        if tasks:
            batch.last_type = tasks[-1].type
        return tasks

    def complete(self, tasks: Sequence[Task], ended: Sequence[Collection[int]] = ()) -> list[int]:
        finished: list[int] = []
        for task, own in with_ended(tasks, ended):
            batch = self._running[task.worker]
            if batch is None:
                raise AssertionError("a task was completed that belongs to no batch")
            batch.num_open -= 1
            if batch.loop is not None:
                batch.loop.drop(own)
                if not batch.loop.steps_left and batch.num_open == 0:
                    batch.loop = None
            if batch.is_over:
                self._running[task.worker] = None
                finished += [one.key for one in batch.members if not one.is_cancelled]
        return finished

    def _next_batch(self, worker: int) -> _Batch | None:
        members = self._waiting.take()
        if not members:
            return None
        batch = _Batch(members, deque(self._merge(members, self._types)))
        self._running[worker] = batch
        return batch

    def _begun(self, batch: _Batch, task: Task) -> _Loop:
        max_steps = {
            member.first + node: steps
            for member in batch.members
            for node, steps in enumerate(member.graph.max_steps)
            if not member.is_cancelled
        }
        left = {node: max_steps[node] for node in task.nodes if node in max_steps}
        return _Loop(task.type, left, len(task.nodes) + task.num_padding)

    def _iteration(self, batch: _Batch, loop: _Loop, worker: int) -> list[Task]:
        """Return the next step of a loop; none while another one runs, or after the last."""
        if loop.has_begun and batch.num_open:
            return []
        loop.has_begun = True
        nodes = [node for node, steps in loop.steps_left.items() if steps]
        for node in nodes:
            loop.steps_left[node] -= 1
        if not any(loop.steps_left.values()):
            loop.steps_left.clear()
        if not nodes:
            return []
        padding = loop.num_rows - len(nodes) if self._keeps_rows else 0
        return [_living(batch, Task(loop.type, nodes, worker, padding), worker)]

    def _cancel(self, worker: int, batch: _Batch, member: Member) -> None:
        member.is_cancelled = True
        nodes = range(member.first, member.first + len(member.graph))
        batch.cancelled.update(nodes)
        if batch.loop is not None:
            batch.loop.drop(nodes)
        if all(other.is_cancelled for other in batch.members):
            batch.tasks.clear()
            batch.loop = None
            if batch.num_open == 0:
                self._running[worker] = None


def _living(batch: _Batch, task: Task, worker: int) -> Task:
    """Return a task on a worker, with padding for the nodes of cancelled requests."""
    nodes = task.nodes
    if batch.cancelled:
        nodes = [node for node in nodes if node not in batch.cancelled]
    return Task(task.type, nodes, worker, task.num_padding + len(task.nodes) - len(nodes))


def by_position(members: Sequence[Member], types: Sequence[CellType]) -> list[Task]:
    """Merge graphs of one structure: each task has the same node of every graph."""
    graph = members[0].graph
    return [
        Task(type, [member.first + node for member in members], 0)
        for node, type in enumerate(graph.types)
    ]


def check_max_graphs(name: str, max_graphs: int | None) -> None:
    if max_graphs is not None and max_graphs < 1:
        raise InvalidConfigError(
            f"policy {name!r}: max_graphs={max_graphs} is not allowed; pass at least 1"
        )


def max_graphs_of(max_graphs: int | None, types: Sequence[CellType]) -> int:
    """Return the most graphs of a batch in which each has a row of every task."""
    most = min(type.max_batch for type in types)
    return most if max_graphs is None else min(max_graphs, most)


@final
@dataclass(frozen=True, kw_only=True)
class IdenticalGraphs:
    """Batches of graphs of one structure; each task has the same node of every graph.

    With one structure in the workload there is nothing to merge and nothing to pad: the ideal line
    of figure 2.15. A tree of 16 leaves is 31 tasks, and none has two nodes of one tree.

    Attributes:
      max_graphs: the most graphs of a batch; by default the smallest `max_batch` of the types.
    """

    max_graphs: int | None = None
    name = "identical_graphs"

    def __post_init__(self) -> None:
        check_max_graphs(self.name, self.max_graphs)

    def new_scheduler(self, types: Sequence[CellType], num_workers: int) -> GraphBatchScheduler:
        max_graphs = max_graphs_of(self.max_graphs, types)
        waiting = Buckets(_structure_of, max_graphs, is_round_robin=False)
        return GraphBatchScheduler(types, num_workers, waiting, by_position)


def _structure_of(graph: CellGraph) -> Hashable:
    return graph.types, graph.predecessors


@final
@dataclass(frozen=True)
class OneAtATime:
    """The first request runs alone, its nodes in order, one node in each task."""

    name = "one_at_a_time"

    def new_scheduler(self, types: Sequence[CellType], num_workers: int) -> GraphBatchScheduler:
        waiting = Buckets(lambda _: 0, 1, is_round_robin=False)
        return GraphBatchScheduler(types, num_workers, waiting, by_position)
