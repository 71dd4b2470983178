"""The ready nodes of a cell type on one worker, in the order in which they run."""

from __future__ import annotations

from collections import deque
from typing import final

import numpy as np

from jaxserve.cells.links import Entry, Waves
from jaxserve.cells.policy import CellType

_NO_NODES = np.zeros(0, np.int64)
# Subgraphs without nodes that a queue may always have.
_MAX_GONE = 64


@final
class Release:
    """The ready nodes of a subgraph of which none has been in a task.

    It has none when they have come to the front of their queue, or their graph has left.
    """

    __slots__ = ("nodes", "waves")

    def __init__(self, nodes: np.ndarray, waves: Waves | None):
        self.nodes = nodes
        self.waves = waves


@final
class NodeQueue:
    """The ready nodes of a type, ordered by the release of their subgraphs.

    Nodes that have come to the front are in one array, of few more than a batch. So a task and a
    cancellation cost the same however many nodes wait behind it.

    Attributes:
      front: the first ready nodes.
      num_ready: the number of ready nodes.
      num_running: submitted tasks that are not completed.
    """

    def __init__(self, type: CellType, index: int):
        self.type = type
        self.index = index
        self.front = _NO_NODES
        self.num_ready = 0
        self.num_running = 0
        self._released: deque[Release] = deque()  # after the front
        self._num_gone = 0  # those of them without nodes

    def num_for(self, worker: int) -> int:
        return self.num_ready

    def count_running(self, num: int) -> None:
        """Count tasks that were submitted, or with a negative number that are completed."""
        self.num_running += num

    def push(self, entry: Entry, first_node: int) -> Release:
        """Add the ready nodes of a subgraph that is released now."""
        waves = entry.waves
        moved = waves and Waves(waves.nodes + first_node, waves.numbers)
        release = Release(entry.nodes + first_node, moved)
        self._released.append(release)
        self.num_ready += len(release.nodes)
        return release

    def drop(self, release: Release) -> None:
        """Drop the nodes of a subgraph whose graph has left."""
        if len(release.nodes):
            self.num_ready -= len(release.nodes)
            release.nodes = _NO_NODES
            self._num_gone += 1
        if self._num_gone > _MAX_GONE and 2 * self._num_gone > len(self._released):
            self._released = deque([one for one in self._released if len(one.nodes)])
            self._num_gone = 0

    def next(self) -> np.ndarray:
        """Return the first ready nodes, at most a full batch."""
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
        """Return the nodes of the next tasks, at most `most`, the number of each, and those after.

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
        """Put nodes in the place of the first of the front.

        Args:
          num: how many are replaced.
          nodes: of the same subgraphs, in their order.
        """
        rest = self.front[num:]
        self.front = np.concatenate([nodes, rest]) if len(nodes) and len(rest) else rest
        if not len(rest):
            self.front = nodes
        self.num_ready += len(nodes) - num

    def replace_all(self, nodes: np.ndarray) -> None:
        """Put nodes in the place of all ready ones; see `replace`."""
        for release in self._released:
            release.nodes = _NO_NODES
        self._released.clear()
        self._num_gone = 0
        self.front = nodes
        self.num_ready = len(nodes)

    def keep(self, is_kept: np.ndarray) -> None:
        """Drop the nodes for which `is_kept`, of the front, is false."""
        front = self.front[is_kept]
        self.num_ready -= len(self.front) - len(front)
        self.front = front
