"""BatchMaker's policy: batches of ready nodes of one type (thesis, 2.4.3, Algorithm 1)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import final

import numpy as np

from jaxserve.cells.cell_graph import NO_SUCCESSOR, CellGraph, SubgraphEntry
from jaxserve.cells.policy import CellType, Task, TaskGroup, groups_of
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
    name = "batchmaker"

    def __post_init__(self) -> None:
        if self.max_tasks_to_submit < 1:
            raise InvalidConfigError(
                f"max_tasks_to_submit={self.max_tasks_to_submit} is not allowed; pass at least 1"
            )

    def new_scheduler(self, types: Sequence[CellType], num_workers: int) -> BatchMakerScheduler:
        return BatchMakerScheduler(types, num_workers, self)


_FREE = -1  # the worker of a subgraph that any worker may run
_SEVERAL = -2  # the worker of a subgraph that waits for tasks of several workers
_NO_NODES = np.zeros(0, np.int64)


@final
class _Pins:
    """The worker of each subgraph while tasks of it, or tasks before it, run (lines 20, 21, 27).

    Arrays are int64 [nodes]; a subgraph is identified by its head. A loop that has begun stays
    pinned, since its state is on its worker.

    Attributes:
      heads: the head of each node's subgraph.
      workers: of each head, a worker, `_FREE` or `_SEVERAL`.
    """

    def __init__(self, num_workers: int) -> None:
        # [worker, value of `workers`]: whether the worker may run it; `_FREE` is the last column.
        self._may_run = np.zeros((num_workers, num_workers + 2), np.bool_)
        np.fill_diagonal(self._may_run, True)
        self._may_run[:, _FREE] = True
        self._rows = np.zeros((4, 0), np.int64)
        self._num_released = 0
        self._grow(64)

    def add(self, heads: np.ndarray, first_node: int) -> None:
        end = first_node + len(heads)
        if end > self._rows.shape[1]:
            self._grow(end)
        self.heads[first_node:end] = heads + first_node
        self.workers[first_node:end] = _FREE
        self._num_running[first_node:end] = 0

    def release(self, head: int) -> None:
        self._places[head] = self._num_released
        self._num_released += 1

    def may_run(self, nodes: np.ndarray, worker: int) -> np.ndarray:
        return self._may_run[worker][self.workers[self.heads[nodes]]]

    def in_order(self, nodes: np.ndarray) -> np.ndarray:
        """Return nodes in the order in which their subgraphs were released."""
        return nodes[np.argsort(self._places[self.heads[nodes]], kind="stable")]

    def submit(self, nodes: np.ndarray, worker: int) -> None:
        heads = self.heads[nodes]
        self.workers[heads] = worker
        np.add.at(self._num_running, heads, 1)

    def submit_before(self, heads: np.ndarray, worker: int) -> None:
        """Record that nodes before these subgraphs were submitted, one for each edge."""
        workers = self.workers[heads]
        self.workers[heads] = np.where((workers == _FREE) | (workers == worker), worker, _SEVERAL)
        np.add.at(self._num_running, heads, 1)

    def complete(self, nodes: np.ndarray, *, are_loops: bool) -> None:
        heads = self.heads[nodes]
        np.subtract.at(self._num_running, heads, 1)
        if not are_loops:
            self.workers[heads[self._num_running[heads] == 0]] = _FREE

    def complete_before(self, heads: np.ndarray) -> np.ndarray:
        """Return those of the subgraphs that waited for several workers, and are free now."""
        np.subtract.at(self._num_running, heads, 1)
        free = heads[self._num_running[heads] == 0]
        waited = free[self.workers[free] == _SEVERAL]
        self.workers[free] = _FREE
        return waited

    def _grow(self, num_nodes: int) -> None:
        self._rows = _grown(self._rows, num_nodes)
        # For a head: the nodes of it, and the edges from nodes before it, that are submitted and
        # not completed; and its place in the order of releases.
        self.heads, self.workers, self._num_running, self._places = self._rows


@final
class _NodeQueue:
    """The ready nodes of a type, ordered by the release of their subgraphs.

    The front holds the first of them, slightly more than a batch for each worker, so that a task
    and a cancellation cost the same however many nodes wait.

    Attributes:
      num_running: tasks that are submitted and not completed.
      pins: None for one worker, which may run every node.
    """

    def __init__(self, type: CellType, index: int, pins: _Pins | None):
        self.type = type
        self.index = index
        self.pins = pins
        self.front = _NO_NODES
        self.num_ready = 0
        self.num_running = 0
        # After the front: head of a subgraph -> its ready nodes.
        self._released: OrderedDict[int, np.ndarray] = OrderedDict()
        self._taken = _NO_NODES  # places in the front of the nodes that `next` returned

    def num_for(self, worker: int) -> int:
        """Return how many nodes a worker may run; with several workers, a batch at most."""
        if self.pins is None or not self.num_ready:
            return self.num_ready
        return len(self.next(worker))

    def push(self, head: int, nodes: np.ndarray) -> None:
        self._released[head] = nodes
        self.num_ready += len(nodes)

    def drop(self, head: int) -> None:
        self.num_ready -= len(self._released.pop(head, _NO_NODES))

    def next(self, worker: int) -> np.ndarray:
        """Return the nodes of a worker's next task; `replace` then removes them."""
        most = self.type.max_batch
        if self.pins is None:
            self._fill(most)
            return self.front[:most]
        self._taken = np.flatnonzero(self.pins.may_run(self.front, worker))[:most]
        while len(self._taken) < most and self._released:
            self._fill(len(self.front) + most - len(self._taken))
            self._taken = np.flatnonzero(self.pins.may_run(self.front, worker))[:most]
        return self.front[self._taken]

    def _fill(self, num: int) -> None:
        """Move released subgraphs to the front, until it has a number of nodes."""
        num -= len(self.front)
        parts = [self.front]
        while num > 0 and self._released:
            _, nodes = self._released.popitem(last=False)
            parts.append(nodes)
            num -= len(nodes)
        if len(parts) > 1:
            self.front = np.concatenate(parts)

    def replace(self, num: int, nodes: np.ndarray) -> None:
        """Replace the `num` nodes of `next` by nodes of the same subgraphs, in order."""
        self.num_ready += len(nodes) - num
        if self.pins is not None and num < len(self.front):
            is_left = np.ones(len(self.front), np.bool_)
            is_left[self._taken] = False
            both = np.concatenate([nodes, self.front[is_left]])
            self.front = self.pins.in_order(both) if len(nodes) else both
            return
        rest = self.front[num:]
        self.front = np.concatenate([nodes, rest]) if len(nodes) and len(rest) else rest
        if not len(rest):
            self.front = nodes

    def keep(self, is_kept: np.ndarray) -> None:
        """Drop the nodes of the front for which `is_kept` is false."""
        front = self.front[is_kept]
        self.num_ready -= len(self.front) - len(front)
        self.front = front


# For each of `Links.rows`, whether it has numbers of nodes.
_IS_NODE = np.array([1, 1, 1, 0, 0, 0, 0, 0, 0])[:, None]
_NO_EDGES: tuple[Sequence[int], Sequence[int]] = ((), ())
# Replaces the count of a cancelled graph's remaining nodes: it never becomes 0.
_NEVER = -1


@final
class BatchMakerScheduler:
    """The scheduler of `BatchMaker`: Algorithm 1, with a few NumPy calls for each task.

    A node is ready when the nodes before it in its subgraph have been submitted. A subgraph is
    released when the nodes before it have been submitted, or have completed (`BatchMaker`); loops
    must have ended. The nodes that follow a task's nodes replace them in the queue, so that older
    subgraphs run first.
    """

    wake_s = None

    def __init__(self, types: Sequence[CellType], num_workers: int, policy: BatchMaker):
        self._pins = _Pins(num_workers) if num_workers > 1 else None
        self._queues = [_NodeQueue(type, index, self._pins) for index, type in enumerate(types)]
        # Highest priority first; of equal ones, the first of the runtime's cells.
        self._by_priority = sorted(self._queues, key=lambda queue: -queue.type.priority)
        self._max_tasks = policy.max_tasks_to_submit
        self._releases_early = policy.releases_at_submission
        self._runs: dict[int, tuple[int, CellGraph]] = {}  # key -> first node, and graph
        self._key_of: dict[int, int] = {}  # first node -> key
        # Subgraphs that are not released: head -> entry, and first node of the graph.
        self._waiting: dict[int, tuple[SubgraphEntry, int]] = {}
        # Node -> its successors (inner, outer), for nodes with several.
        self._several: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        # For each worker, in the order of submission: the tasks that are not completed.
        self._submitted: list[deque[TaskGroup]] = [deque() for _ in range(num_workers)]
        # For each node, see `_grow`.
        self._state = np.zeros((len(_IS_NODE) + 2, 0), np.int64)
        self._grow(64)

    @property
    def has_work(self) -> bool:
        return bool(self._runs)

    def add(self, key: int, graph: CellGraph, first_node: int, now_s: float) -> None:
        links, end = graph.links, first_node + len(graph)
        if end > self._state.shape[1]:
            self._grow(end)
        self._runs[key] = first_node, graph
        self._key_of[first_node] = key
        np.add(links.rows, first_node * _IS_NODE, out=self._of_links[:, first_node:end])
        self._num_left[first_node] = len(graph)
        if self._pins is not None:
            self._pins.add(links.heads, first_node)
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
                self._push(entry, first_node)

    def cancel(self, key: int) -> None:
        first, graph = self._runs[key]
        end = first + len(graph)
        self._forget(key)
        self._num_left[first] = _NEVER
        self._is_over[first:end] = 1
        for entry in graph.links.entries:
            self._waiting.pop(first + entry.head, None)
            for head, _ in self._parts(entry, first):
                self._queues[entry.type].drop(head)
        for type in {entry.type for entry in graph.links.entries}:
            front = self._queues[type].front
            self._queues[type].keep((front < first) | (front >= end))

    def schedule(self, worker: int, now_s: float) -> Sequence[Task]:
        queue = self._choose(worker)
        if queue is None:
            return []
        parts: list[np.ndarray] = []
        all_sizes: list[int] = []
        while len(all_sizes) < self._max_tasks:
            nodes = queue.next(worker)
            if not len(nodes) or (parts and len(nodes) < queue.type.min_batch):
                break
            num_ready, sizes = len(nodes), [len(nodes)]
            if queue.type.is_loop:
                after = self._repeated(nodes)
            else:
                nodes, sizes = self._batches(queue, nodes, self._max_tasks - len(all_sizes))
                after = self._followers(nodes[-sizes[-1] :], worker)
            parts.append(nodes)
            all_sizes += sizes
            queue.replace(num_ready, after)
        nodes = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return self._submit(queue, worker, nodes, all_sizes)

    def complete(self, tasks: Sequence[Task], ended: Sequence[Collection[int]] = ()) -> list[int]:
        (group,) = groups_of(tasks)
        submitted = self._submitted[group.worker]
        own = submitted.popleft()
        if group is not own:
            own, left = own[: len(tasks)], own[len(tasks) :]
            if not np.array_equal(group.array, own.array):
                raise AssertionError("tasks of a worker must be completed in their order")
            if len(left):
                submitted.appendleft(left)
        queue = self._queues[own.type]
        queue.num_running -= len(tasks)
        finished = []
        for first in self._completed(queue, own, ended):
            key = self._key_of.get(first)
            if key is not None:  # it was not cancelled
                finished.append(key)
                self._forget(key)
        return finished

    def _choose(self, worker: int) -> _NodeQueue | None:
        """Return the queue of the type that runs next (lines 5 to 10), or None."""
        idle = some = None
        for queue in self._by_priority:
            num_ready = queue.num_for(worker)
            if num_ready >= queue.type.max_batch:
                return queue
            if num_ready:
                if idle is None and queue.num_running == 0:
                    idle = queue
                if some is None:
                    some = queue
        return idle or some

    def _submit(
        self, queue: _NodeQueue, worker: int, nodes: np.ndarray, sizes: list[int]
    ) -> TaskGroup:
        tasks = TaskGroup(queue.index, worker, nodes, sizes)
        self._submitted[worker].append(tasks)
        queue.num_running += len(sizes)
        if self._pins is not None:
            self._pins.submit(nodes, worker)
        return tasks

    def _batches(
        self, queue: _NodeQueue, nodes: np.ndarray, most: int
    ) -> tuple[np.ndarray, list[int]]:
        """Return the nodes and sizes of the next tasks; the first task has `nodes`.

        A later task continues the lines of the previous one (see `Links`), as long as no other node
        can join them.
        """
        has_room = len(nodes) < queue.type.max_batch or queue.num_ready == len(nodes)
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

    def _completed(
        self, queue: _NodeQueue, tasks: TaskGroup, ended: Sequence[Collection[int]]
    ) -> list[int]:
        """Count the nodes of completed tasks; return the first nodes of graphs that ended."""
        pins, is_loop = self._pins, queue.type.is_loop
        if pins is not None:
            pins.complete(tasks.array, are_loops=is_loop)
        if not is_loop:
            if pins is not None or not self._releases_early:
                heads = self._successors(tasks.array, self._outer, 1)
                if len(heads):
                    self._completed_before(heads[self._is_over[heads] == 0])  # not cancelled
            return self._left_by(tasks.array)
        found: list[int] = []
        for nodes, own in zip(tasks.arrays(), ended or repeat(()), strict=bool(ended)):
            over = self._ended(queue, nodes, own)
            if len(over):
                self._release(self._successors(over, self._outer, 1))
                found += self._left_by(over)
        return found

    def _completed_before(self, heads: np.ndarray) -> None:
        """Record that nodes before these subgraphs have completed, one for each edge."""
        if not self._releases_early:
            self._release(heads)
        elif self._pins is not None:
            waited = self._pins.complete_before(heads)
            self._push_all(waited[self._outer_left[waited] == 0])

    def _left_by(self, nodes: np.ndarray) -> list[int]:
        owners = self._owner[nodes]
        np.subtract.at(self._num_left, owners, 1)
        return self._last_of_each(owners[self._num_left[owners] == 0]).tolist()

    def _repeated(self, nodes: np.ndarray) -> np.ndarray:
        self._num_running[nodes] += 1
        self._steps_left[nodes] -= 1
        return nodes[self._steps_left[nodes] != 0]

    def _followers(self, nodes: np.ndarray, worker: int) -> np.ndarray:
        """Return the nodes that may follow a submitted task's; release the subgraphs after them."""
        after = self._successors(nodes, self._inner, 0)
        np.subtract.at(self._inner_left, after, 1)
        if self._releases_early:
            heads = self._successors(nodes, self._outer, 1)
            if self._pins is not None and len(heads):
                self._pins.submit_before(heads, worker)
            self._release(heads)
        return self._last_of_each(after[self._inner_left[after] == 0])

    def _release(self, heads: np.ndarray) -> None:
        """Release subgraphs for which no edge is left, unless they wait for several workers."""
        if not len(heads):
            return
        np.subtract.at(self._outer_left, heads, 1)
        ready = heads[self._outer_left[heads] == 0]
        if self._pins is not None:
            ready = ready[self._pins.workers[ready] != _SEVERAL]
        self._push_all(ready)

    def _push_all(self, heads: np.ndarray) -> None:
        for head in self._last_of_each(heads).tolist():
            self._push(*self._waiting.pop(head))

    def _push(self, entry: SubgraphEntry, first: int) -> None:
        for head, nodes in self._parts(entry, first):
            if self._pins is not None:
                self._pins.release(head)
            self._queues[entry.type].push(head, nodes)

    def _parts(self, entry: SubgraphEntry, first: int) -> list[tuple[int, np.ndarray]]:
        """Return head and nodes of what is released together; each may run on any worker."""
        nodes = entry.nodes + first
        if self._pins is None or not entry.is_several:
            return [(first + entry.head, nodes)]
        return [(node, nodes[i : i + 1]) for i, node in enumerate(nodes.tolist())]

    def _ended(self, queue: _NodeQueue, nodes: np.ndarray, ended: Collection[int]) -> np.ndarray:
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
                each += self._several.get(node, _NO_EDGES)[kind]  # none if it was cancelled
        return np.array(each, np.int64)

    def _last_of_each(self, nodes: np.ndarray) -> np.ndarray:
        """Return the distinct nodes, ordered by their last occurrences."""
        if len(nodes) < 2:
            return nodes
        places = np.arange(len(nodes))
        self._place[nodes] = places  # NumPy keeps the last of several values
        return nodes[self._place[nodes] == places]

    def _forget(self, key: int) -> None:
        first, graph = self._runs.pop(key)
        del self._key_of[first]
        for node in graph.links.several:
            del self._several[first + node]

    def _grow(self, num_nodes: int) -> None:
        new = self._state = _grown(self._state, num_nodes)
        # For each node, see `Links.rows`: its successors; the first node of its graph; the
        # predecessors in its subgraph that have not been submitted; and its line.
        self._of_links = new[: len(_IS_NODE)]
        self._inner, self._outer, self._owner, self._inner_left, self._ahead, self._alone = new[:6]
        # For a loop: the steps that may be submitted, the submitted and not completed steps, and
        # whether it has ended. A cancelled graph's nodes have all ended.
        self._steps_left, self._num_running, self._is_over = new[6:9]
        # For a head: the edges from other subgraphs for which it waits. For a first node: the
        # graph's nodes that have not been completed.
        self._outer_left, self._num_left = new[9:]
        self._place = np.zeros(new.shape[1], np.int64)


def _grown(rows: np.ndarray, num_nodes: int) -> np.ndarray:
    """Return rows [n, nodes] for at least `num_nodes`, with the same values so far."""
    new = np.zeros((len(rows), 1 << (num_nodes - 1).bit_length()), np.int64)
    new[:, : rows.shape[1]] = rows
    return new
