"""Algorithm 1 on one worker (thesis, 2.4.3), over arrays of nodes.

On one worker, subgraphs need no pinning, and a subgraph may run as soon as the nodes before it have
been submitted. Then a task costs a few NumPy calls, whatever the number of its nodes is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from itertools import accumulate, repeat
from typing import final

import numpy as np

from jaxserve.cells.cell_graph import CellGraph
from jaxserve.cells.choice import choose
from jaxserve.cells.links import NO_SUCCESSOR, Entry
from jaxserve.cells.node_queue import NodeQueue, Release
from jaxserve.cells.policy import CellType, Task, TaskGroup, nodes_of

# Rows of `OneWorkerScheduler._state`.
_NUM_ROWS = 11
# Of each of `Links.rows`, whether it has numbers of nodes.
_IS_NODE = np.array([1, 1, 1, 0, 0, 0])[:, None]
# In place of the nodes that a cancelled graph has left: it never becomes 0.
_NEVER = -1


@final
class _Submitted:
    """Tasks that were submitted together and have not all been completed.

    Attributes:
      ends: (number of a task, first node of a graph) of graphs whose last nodes to be submitted it
        has, in the order of the tasks; empty with loops.
      num_completed: tasks that have been completed, the first ones.
    """

    __slots__ = ("tasks", "ends", "num_completed")

    def __init__(self, tasks: TaskGroup, ends: Sequence[tuple[int, int]]):
        self.tasks = tasks
        self.ends = ends
        self.num_completed = 0


@final
class OneWorkerScheduler:
    """See `CellScheduler` and `BatchMaker`; it returns the tasks of `BatchMakerScheduler`.

    A node is ready when the nodes before it have been submitted, or have ended if they are loops.
    The nodes that follow a task's nodes in their subgraphs take their places in the queue, so that
    older subgraphs run first.
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
        # Subgraphs that are not released, by their heads: their entries, and first nodes of graphs.
        self._waiting: dict[int, tuple[Entry, int]] = {}
        # Node -> its successors (inner, outer), of those that have several.
        self._several: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        self._submitted: deque[_Submitted] = deque()
        # Of each node, see `_grow`.
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
            # Nothing outside waits for a subgraph with waves.
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
        """Return tasks of so many of the nodes each, which are submitted now."""
        tasks = TaskGroup(queue.index, 0, nodes, sizes)
        self._submitted.append(_Submitted(tasks, self._counted(nodes, sizes)))
        queue.count_running(len(sizes))
        return tasks

    def _batches(
        self, queue: NodeQueue, nodes: np.ndarray, most: int
    ) -> tuple[np.ndarray, list[int]]:
        """Return the nodes of the next tasks, and the number of each task; the first has these.

        A task after the first continues the lines of the one before it (see `Links`), as long as no
        other node can join them.
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
        """Count the nodes of submitted tasks; return the graphs that end with them.

        Without loops, a graph ends with the task that has the last of its nodes to be submitted.

        Returns:
          See `_Submitted.ends`.
        """
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
        """Count the nodes of completed tasks; return the first nodes of graphs that have ended.

        With loops, whose ends are known only now.
        """
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
        """Count nodes that have run; return the first nodes of graphs that end with them."""
        owners = self._owner[nodes]
        np.subtract.at(self._num_left, owners, 1)
        return self._last_of_each(owners[self._num_left[owners] == 0]).tolist()

    def _repeated(self, nodes: np.ndarray) -> np.ndarray:
        """Return the loops of a submitted task that may run another step."""
        self._num_running[nodes] += 1
        self._steps_left[nodes] -= 1
        return nodes[self._steps_left[nodes] != 0]

    def _followers(self, nodes: np.ndarray) -> np.ndarray:
        """Return the nodes that may follow a submitted task's in their subgraphs.

        Subgraphs after them are released, too.
        """
        after = self._successors(nodes, self._inner, 0)
        np.subtract.at(self._inner_left, after, 1)
        self._release(self._successors(nodes, self._outer, 1))
        return self._last_of_each(after[self._inner_left[after] == 0])

    def _release(self, heads: np.ndarray) -> None:
        """Take note that nodes before subgraphs need not be waited for, once for each edge."""
        if not len(heads):
            return
        np.subtract.at(self._outer_left, heads, 1)
        for head in self._last_of_each(heads[self._outer_left[heads] == 0]).tolist():
            entry, first = self._waiting.pop(head)
            self._push(self._key_of[first], entry, first)

    def _push(self, key: int, entry: Entry, first: int) -> None:
        """Release a subgraph of a graph."""
        self._runs[key][2].append((entry.type, self._queues[entry.type].push(entry, first)))

    def _ended(self, queue: NodeQueue, nodes: np.ndarray, ended: Collection[int]) -> np.ndarray:
        """Return the loops for which a completed step was the last one, and let no more run."""
        self._num_running[nodes] -= 1
        is_last = (self._steps_left[nodes] == 0) & (self._num_running[nodes] == 0)
        if ended:
            is_last |= np.fromiter(map(ended.__contains__, nodes.tolist()), np.bool_, len(nodes))
        found = nodes[is_last & (self._is_over[nodes] == 0)]
        if len(found):
            self._is_over[found] = 1
            # Loops that have begun are at the front.
            queue.keep(self._is_over[queue.front] == 0)
        return found

    def _successors(self, nodes: np.ndarray, links: np.ndarray, kind: int) -> np.ndarray:
        """Return the successors of nodes, in their order, once for each edge.

        Args:
          links: `_inner` or `_outer`.
          kind: 0 for inner ones, 1 for outer ones.
        """
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
        """Return nodes without repetition, in the order of their last places."""
        if len(nodes) < 2:
            return nodes
        places = np.arange(len(nodes))
        self._place[nodes] = places  # NumPy leaves the last of several values behind
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
        # Of each node, see `Links.rows`: its successors; the first node of its graph; the
        # predecessors in its subgraph that have not been submitted; and its line.
        self._of_links = new[: len(_IS_NODE)]
        self._inner, self._outer, self._owner, self._inner_left, self._ahead, self._alone = new[:6]
        # Of a head, the edges from other subgraphs for which it waits; of a first node, the graph's
        # nodes that have not been submitted, or completed if there are loops.
        self._outer_left, self._num_left = new[6:8]
        # Of a loop: the steps that may be submitted, and those that are and have not completed;
        # and whether it has ended.
        self._steps_left, self._num_running, self._is_over = new[8:]
        self._place = np.zeros(num_nodes, np.int64)
