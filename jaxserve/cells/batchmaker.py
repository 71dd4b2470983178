"""BatchMaker's policy: batches of ready nodes of one type (thesis, 2.4.3, Algorithm 1)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import Protocol, TypeVar, final

import numpy as np

from jaxserve.cells.cell_graph import CellGraph
from jaxserve.cells.links import NO_SUCCESSOR, SubgraphEntry, Waves
from jaxserve.cells.policy import CellScheduler, CellType, Task, TaskGroup, nodes_of, with_ended
from jaxserve.core.errors import InvalidConfigError


@final
@dataclass(frozen=True, kw_only=True)
class BatchMaker:
    """Algorithm 1: types with full batches first, then idle types, then any; highest priority.

    Attributes:
      max_tasks_to_submit: most tasks of one type that are submitted together.
      releases_at_submission: whether a subgraph may run, on the same worker, as soon as all nodes
        it depends on have been submitted to that worker. Otherwise it waits until they have
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


class TypeQueue(Protocol):
    """The ready nodes of a type, of which `num_running` tasks are submitted and not completed."""

    @property
    def type(self) -> CellType: ...

    @property
    def num_running(self) -> int: ...

    def num_for(self, worker: int) -> int:
        """Return the number of nodes that a worker may run now."""
        ...


_AnyQueue = TypeVar("_AnyQueue", bound=TypeQueue)


def choose(queues: Iterable[_AnyQueue], worker: int) -> _AnyQueue | None:
    """Return the queue of the type that runs next, or None; `queues` are in order of priority."""
    idle = some = None
    for queue in queues:
        num_ready = queue.num_for(worker)
        if num_ready >= queue.type.max_batch:
            return queue
        if num_ready:
            if idle is None and queue.num_running == 0:
                idle = queue
            if some is None:
                some = queue
    return idle or some


_NO_NODES = np.zeros(0, np.int64)
# Number of empty subgraphs that a queue may hold at any size.
_MAX_GONE = 64


@final
class Release:
    """The ready nodes of a subgraph; empty once they are in the front or their graph has left."""

    __slots__ = ("nodes", "waves")

    def __init__(self, nodes: np.ndarray, waves: Waves | None):
        self.nodes = nodes
        self.waves = waves


@final
class NodeQueue:
    """The ready nodes of a type, ordered by the release of their subgraphs.

    The front holds the first of them, slightly more than a batch, so that a task and a cancellation
    cost the same however many nodes wait.
    """

    def __init__(self, type: CellType, index: int):
        self.type = type
        self.index = index
        self.front = _NO_NODES
        self.num_ready = 0
        self.num_running = 0
        self._released: deque[Release] = deque()  # after the front
        self._num_gone = 0  # empty ones among them

    def num_for(self, worker: int) -> int:
        return self.num_ready

    def count_running(self, num: int) -> None:
        self.num_running += num

    def push(self, entry: SubgraphEntry, first_node: int) -> Release:
        waves = entry.waves
        moved = waves and Waves(waves.nodes + first_node, waves.numbers)
        release = Release(entry.nodes + first_node, moved)
        self._released.append(release)
        self.num_ready += len(release.nodes)
        return release

    def drop(self, release: Release) -> None:
        if len(release.nodes):
            self.num_ready -= len(release.nodes)
            release.nodes = _NO_NODES
            self._num_gone += 1
        if self._num_gone > _MAX_GONE and 2 * self._num_gone > len(self._released):
            self._released = deque([one for one in self._released if len(one.nodes)])
            self._num_gone = 0

    def next(self) -> np.ndarray:
        most = self.type.max_batch
        num, parts = len(self.front), [self.front]
        while num < most and self._released:
            release = self._released.popleft()
            self._num_gone -= not len(release.nodes)
            parts.append(release.nodes)
            num += len(release.nodes)
            release.nodes = _NO_NODES
        if len(parts) > 1:
            self.front = np.concatenate(parts)
        return self.front[:most]

    def waves(self, most: int) -> tuple[np.ndarray, list[int], np.ndarray] | None:
        """Return nodes and sizes of at most `most` next tasks, and the later nodes.

        None if it is not known that each task has all nodes that are ready then.
        """
        # Each subgraph has a node in the first task.
        if len(self.front) or len(self._released) - self._num_gone > self.type.max_batch:
            return None
        released = [release.waves for release in self._released if len(release.nodes)]
        known = [waves for waves in released if waves is not None]
        if not known or len(known) < len(released):
            return None
        nodes, numbers = known[0]
        if len(known) > 1:
            nodes, numbers = map(np.concatenate, zip(*known, strict=True))
            nodes = nodes[np.argsort(numbers, kind="stable")]
        sizes = np.bincount(numbers)[: most + 1].tolist()
        if max(sizes) > self.type.max_batch or min(sizes) < self.type.min_batch:
            return None
        end = sum(sizes[:most])
        return nodes[:end], sizes[:most], nodes[end : end + sum(sizes[most:])]

    def replace(self, num: int, nodes: np.ndarray) -> None:
        """Replace the first `num` nodes of the front by nodes of the same subgraphs, in order."""
        rest = self.front[num:]
        self.front = np.concatenate([nodes, rest]) if len(nodes) and len(rest) else rest
        if not len(rest):
            self.front = nodes
        self.num_ready += len(nodes) - num

    def replace_all(self, nodes: np.ndarray) -> None:
        for release in self._released:
            release.nodes = _NO_NODES
        self._released.clear()
        self._num_gone = 0
        self.front = nodes
        self.num_ready = len(nodes)

    def keep(self, is_kept: np.ndarray) -> None:
        """Drop the nodes of the front for which `is_kept` is false."""
        front = self.front[is_kept]
        self.num_ready -= len(self.front) - len(front)
        self.front = front


# Rows of `OneWorkerScheduler._state`.
_NUM_ROWS = 11
# For each of `Links.rows`, whether it has numbers of nodes.
_IS_NODE = np.array([1, 1, 1, 0, 0, 0])[:, None]
# Replaces the count of a cancelled graph's remaining nodes: it never becomes 0.
_NEVER = -1


@final
class _Submitted:
    """Tasks that were submitted together and are not all completed.

    `ends` has, without loops, (number of a task, first node of a graph) of graphs that end with it.
    """

    __slots__ = ("tasks", "ends", "num_completed")

    def __init__(self, tasks: TaskGroup, ends: Sequence[tuple[int, int]]):
        self.tasks = tasks
        self.ends = ends
        self.num_completed = 0


@final
class OneWorkerScheduler:
    """The scheduler of `BatchMaker` for one worker; it returns the tasks of `BatchMakerScheduler`.

    A node is ready when the nodes before it have been submitted, or have ended if they are loops.
    The nodes that follow a task's nodes in their subgraphs replace them in the queue, so that older
    subgraphs run first.
    """

    wake_s = None

    def __init__(self, types: Sequence[CellType], max_tasks_to_submit: int):
        self._queues = [NodeQueue(type, index) for index, type in enumerate(types)]
        # Highest priority first; of equal ones, the first of the runtime's cells.
        self._by_priority = sorted(self._queues, key=lambda queue: -queue.type.priority)
        self._has_loops = any(type.is_loop for type in types)
        self._max_tasks = max_tasks_to_submit
        # key -> first node, graph, and its subgraphs that have been released, with their types.
        self._runs: dict[int, tuple[int, CellGraph, list[tuple[int, Release]]]] = {}
        self._key_of: dict[int, int] = {}  # first node -> key
        # Subgraphs that are not released: head -> entry, and first node of the graph.
        self._waiting: dict[int, tuple[SubgraphEntry, int]] = {}
        # Node -> its successors (inner, outer), for nodes with several.
        self._several: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        self._submitted: deque[_Submitted] = deque()
        # For each node, see `_grow`.
        self._state = np.zeros((_NUM_ROWS, 0), np.int64)
        self._grow(64)

    @property
    def has_work(self) -> bool:
        return bool(self._runs)

    def add(self, key: int, graph: CellGraph, first_node: int, now_s: float) -> None:
        links, end = graph.links, first_node + len(graph)
        if end > self._state.shape[1]:
            self._grow(1 << (end - 1).bit_length())
        self._runs[key] = first_node, graph, []
        self._key_of[first_node] = key
        np.add(links.rows, first_node * _IS_NODE, out=self._of_links[:, first_node:end])
        self._num_left[first_node] = len(graph)
        if self._has_loops:
            self._steps_left[first_node:end] = links.max_steps
            self._num_running[first_node:end] = 0
            self._is_over[first_node:end] = 0
        for node, (inner, outer) in links.several.items():
            self._several[first_node + node] = (
                [first_node + other for other in inner],
                [first_node + head for head in outer],
            )
        for entry in links.entries:
            if entry.num_before:
                self._outer_left[first_node + entry.head] = entry.num_before
                self._waiting[first_node + entry.head] = entry, first_node
            else:
                self._push(key, entry, first_node)

    def cancel(self, key: int) -> None:
        first, graph, released = self._runs[key]
        end = first + len(graph)
        self._forget(key)
        self._num_left[first] = _NEVER
        self._is_over[first:end] = 1
        for entry in graph.links.entries:
            self._waiting.pop(first + entry.head, None)
        for type, release in released:
            self._queues[type].drop(release)
        for type in {type for type, _ in released}:
            front = self._queues[type].front
            self._queues[type].keep((front < first) | (front >= end))

    def schedule(self, worker: int, now_s: float) -> Sequence[Task]:
        queue = choose(self._by_priority, worker)
        if queue is None:
            return []
        if (waves := queue.waves(self._max_tasks)) is not None:
            nodes, sizes, after = waves
            # No other subgraph depends on a subgraph with waves.
            np.subtract.at(self._inner_left, self._successors(nodes, self._inner, 0), 1)
            queue.replace_all(after)
            return self._submit(queue, nodes, sizes)
        parts: list[np.ndarray] = []
        all_sizes: list[int] = []
        while len(all_sizes) < self._max_tasks:
            nodes = queue.next()
            if not len(nodes) or (parts and len(nodes) < queue.type.min_batch):
                break
            num_ready, sizes = len(nodes), [len(nodes)]
            if queue.type.is_loop:
                after = self._repeated(nodes)
            else:
                nodes, sizes = self._batches(queue, nodes, self._max_tasks - len(all_sizes))
                after = self._followers(nodes[-sizes[-1] :])
            parts.append(nodes)
            all_sizes += sizes
            queue.replace(num_ready, after)
        nodes = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return self._submit(queue, nodes, all_sizes)

    def complete(self, tasks: Sequence[Task], ended: Sequence[Collection[int]] = ()) -> list[int]:
        submitted = self._submitted[0]
        begin, own = submitted.num_completed, submitted.tasks
        end = submitted.num_completed = begin + len(tasks)
        if tasks is not own and not np.array_equal(nodes_of(tasks), own[begin:end].array):
            raise AssertionError("tasks of a worker must be completed in their order")
        if end == len(own):
            self._submitted.popleft()
        queue = self._queues[own.type]
        queue.count_running(-len(tasks))
        if self._has_loops:
            graphs = self._completed(queue, own[begin:end], ended)
        else:
            graphs = [first for number, first in submitted.ends if begin <= number < end]
        finished = []
        for first in graphs:
            key = self._key_of.get(first)
            if key is not None:  # it was not cancelled
                finished.append(key)
                self._forget(key)
        return finished

    def _submit(self, queue: NodeQueue, nodes: np.ndarray, sizes: list[int]) -> TaskGroup:
        tasks = TaskGroup(queue.index, 0, nodes, sizes)
        self._submitted.append(_Submitted(tasks, self._counted(nodes, sizes)))
        queue.count_running(len(sizes))
        return tasks

    def _batches(
        self, queue: NodeQueue, nodes: np.ndarray, most: int
    ) -> tuple[np.ndarray, list[int]]:
        """Return the nodes and sizes of the next tasks; the first task has `nodes`.

        A later task continues the lines of the previous one (see `Links`), as long as no other node
        can join them.
        """
        has_room = queue.num_ready == len(nodes)
        ahead = self._ahead[nodes]
        alone = self._alone[nodes] if has_room else ahead + 1
        num = min(most, int(alone.min()))
        if num == 1 or len(nodes) < queue.type.min_batch:
            return nodes, [len(nodes)]
        num = min(num, int(ahead.max()) + 1)
        steps = np.arange(num)[:, None]
        each = nodes + steps
        if ahead.min() >= num - 1:
            return each.ravel(), [len(nodes)] * num
        goes_on = ahead >= steps
        # A later task has at most as many nodes as one before it.
        least = queue.type.min_batch
        sizes = [size for size in np.count_nonzero(goes_on, axis=1).tolist() if size >= least]
        return each[goes_on][: sum(sizes)], sizes

    def _counted(self, nodes: np.ndarray, sizes: list[int]) -> list[tuple[int, int]]:
        """Count the nodes of submitted tasks; return `_Submitted.ends` of graphs without loops."""
        if self._has_loops:
            return []
        owners = self._owner[nodes]
        np.subtract.at(self._num_left, owners, 1)
        is_done = self._num_left[owners] == 0
        if not is_done.any():
            return []
        places = np.arange(len(owners))
        self._place[owners] = places
        last = np.flatnonzero(is_done & (self._place[owners] == places))
        numbers = np.searchsorted(list(accumulate(sizes)), last, side="right")
        return list(zip(numbers.tolist(), owners[last].tolist(), strict=True))

    def _completed(
        self, queue: NodeQueue, tasks: TaskGroup, ended: Sequence[Collection[int]]
    ) -> list[int]:
        """Count the nodes of completed tasks with loops; return the first nodes of ended graphs."""
        if not queue.type.is_loop:
            return self._left_by(tasks.array)
        found: list[int] = []
        for nodes, own in zip(tasks.arrays(), ended or repeat(()), strict=bool(ended)):
            over = self._ended(queue, nodes, own)
            if len(over):
                self._release(self._successors(over, self._outer, 1))
                found += self._left_by(over)
        return found

    def _left_by(self, nodes: np.ndarray) -> list[int]:
        owners = self._owner[nodes]
        np.subtract.at(self._num_left, owners, 1)
        return self._last_of_each(owners[self._num_left[owners] == 0]).tolist()

    def _repeated(self, nodes: np.ndarray) -> np.ndarray:
        self._num_running[nodes] += 1
        self._steps_left[nodes] -= 1
        return nodes[self._steps_left[nodes] != 0]

    def _followers(self, nodes: np.ndarray) -> np.ndarray:
        """Return the nodes that may follow a submitted task's; release the subgraphs after them."""
        after = self._successors(nodes, self._inner, 0)
        np.subtract.at(self._inner_left, after, 1)
        self._release(self._successors(nodes, self._outer, 1))
        return self._last_of_each(after[self._inner_left[after] == 0])

    def _release(self, heads: np.ndarray) -> None:
        if not len(heads):
            return
        np.subtract.at(self._outer_left, heads, 1)
        for head in self._last_of_each(heads[self._outer_left[heads] == 0]).tolist():
            entry, first = self._waiting.pop(head)
            self._push(self._key_of[first], entry, first)

    def _push(self, key: int, entry: SubgraphEntry, first: int) -> None:
        self._runs[key][2].append((entry.type, self._queues[entry.type].push(entry, first)))

    def _ended(self, queue: NodeQueue, nodes: np.ndarray, ended: Collection[int]) -> np.ndarray:
        """Return the loops whose last step has completed, and submit no further steps of them."""
        self._num_running[nodes] -= 1
        is_last = (self._steps_left[nodes] == 0) & (self._num_running[nodes] == 0)
        if ended:
            is_last |= np.fromiter(map(ended.__contains__, nodes.tolist()), np.bool_, len(nodes))
        found = nodes[is_last & (self._is_over[nodes] == 0)]
        if len(found):
            self._is_over[found] = 1
            # Loops that have begun are in the front.
            queue.keep(self._is_over[queue.front] == 0)
        return found

    def _successors(self, nodes: np.ndarray, links: np.ndarray, kind: int) -> np.ndarray:
        """Return the successors of nodes, in their order, once for each edge."""
        found = links[nodes]
        if not (self._several and (found < NO_SUCCESSOR).any()):
            return found[found >= 0]
        each: list[int] = []
        for node, successor in zip(nodes.tolist(), found.tolist(), strict=True):
            if successor >= 0:
                each.append(successor)
            elif successor < NO_SUCCESSOR:
                each += self._several[node][kind]
        return np.array(each, np.int64)

    def _last_of_each(self, nodes: np.ndarray) -> np.ndarray:
        """Return the distinct nodes, ordered by their last occurrences."""
        if len(nodes) < 2:
            return nodes
        places = np.arange(len(nodes))
        self._place[nodes] = places  # NumPy keeps the last of several values
        return nodes[self._place[nodes] == places]

    def _forget(self, key: int) -> None:
        first, graph, _ = self._runs.pop(key)
        del self._key_of[first]
        for node in graph.links.several:
            del self._several[first + node]

    def _grow(self, num_nodes: int) -> None:
        new = np.zeros((_NUM_ROWS, num_nodes), np.int64)
        new[:, : self._state.shape[1]] = self._state
        self._state = new
        # For each node, see `Links.rows`: its successors; the first node of its graph; the
        # predecessors in its subgraph that have not been submitted; and its line.
        self._of_links = new[: len(_IS_NODE)]
        self._inner, self._outer, self._owner, self._inner_left, self._ahead, self._alone = new[:6]
        # For a head: the edges from other subgraphs for which it waits. For a first node: the
        # graph's nodes that have not been submitted, or completed if there are loops.
        self._outer_left, self._num_left = new[6:8]
        # For a loop: the steps that may be submitted, the submitted and not completed steps, and
        # whether it has ended.
        self._steps_left, self._num_running, self._is_over = new[8:]
        self._place = np.zeros(num_nodes, np.int64)


_FREE = -1  # the worker of a subgraph that any worker may run
_SEVERAL = -2  # the worker of a subgraph that waits for tasks of several workers


class _Run:
    __slots__ = ("key", "graph", "first", "num_left", "dependencies", "subgraphs", "is_over")

    def __init__(self, key: int, graph: CellGraph, first: int):
        self.key = key
        self.graph = graph
        self.first = first
        self.num_left = len(graph)  # nodes that have not run
        # For each node: the predecessors in its subgraph that have not been submitted.
        self.dependencies = list(graph.inner_dependencies)
        self.subgraphs: list[_Subgraph] = []
        self.is_over = False


class _Subgraph:
    """A subgraph of a run; on one worker, also all nodes of one entry of `CellGraph.starts`.

    Attributes:
      num_open: nodes that have not been submitted; a loop counts until it has ended.
      num_before: edges from nodes of other subgraphs that do not allow it to run yet.
      num_running: submitted and not completed tasks with its nodes or with nodes before it.
      worker: the worker of these tasks; `_FREE` without any.
      place: its key in its type's queue, in the order of release; -1 outside of the queue.
      is_bound: whether it is a loop that has begun, whose state is on its worker.
    """

    __slots__ = (
        "run",
        "type",
        "ready",
        "num_open",
        "num_before",
        "num_running",
        "worker",
        "place",
        "steps_left",
        "is_bound",
        "is_ended",
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

    `num_ready` counts ready nodes that any worker may run, `num_pinned` those of each worker alone.
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
    """The scheduler of `BatchMaker` for any number of workers."""

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
        # For each worker: (task, [(subgraph, its nodes in the task)]) in the order of submission.
        self._submitted: list[deque[tuple[Task, list[tuple[_Subgraph, list[int]]]]]] = [
            deque() for _ in range(num_workers)
        ]

    @property
    def has_work(self) -> bool:
        return bool(self._runs)

    def add(self, key: int, graph: CellGraph, first_node: int, now_s: float) -> None:
        run = self._runs[key] = _Run(key, graph, first_node)
        for type, nodes in graph.starts:
            # One worker may run them together. With several workers, each node may run on any.
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
            # Followers come before nodes that did not fit into the task.
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
        """Return the node of a loop if this step was its last one; otherwise nothing."""
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
        subgraph.num_running += 1
        if subgraph.worker == _FREE:
            subgraph.worker = worker
        elif subgraph.worker != worker:
            subgraph.worker = _SEVERAL
        subgraph.num_before -= 1
        if subgraph.num_before == 0 and subgraph.worker != _SEVERAL:
            self._queues[subgraph.type].push(subgraph)

    def _completed_before(self, subgraph: _Subgraph, is_loop: bool) -> None:
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
