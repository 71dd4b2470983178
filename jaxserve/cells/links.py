"""The edges of a graph as arrays, for a scheduler that handles the nodes of a task at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

# Values without a single successor. After adding a graph's first node id they stay distinct and
# negative.
NO_SUCCESSOR = -(1 << 40)
SEVERAL = 2 * NO_SUCCESSOR
# More tasks than a graph has nodes.
_ANY_NUMBER = 1 << 40
# `Links.rows` of a node within a chain, except its number and those after it.
_IN_CHAIN = np.array([[0], [NO_SUCCESSOR], [0], [1], [0], [_ANY_NUMBER]])


class Waves(NamedTuple):
    """The tasks of a subgraph that no other depends on, if each has all of its ready nodes.

    `nodes` int64 [nodes] starts with those of the first task; `numbers` int64 [nodes] are their
    tasks.
    """

    nodes: np.ndarray
    numbers: np.ndarray


class SubgraphEntry(NamedTuple):
    """The nodes of a subgraph that are ready when the nodes before the subgraph have run.

    Attributes:
      head: the first node of the subgraph, which identifies it.
      nodes: int64 [n], those without a predecessor in the subgraph.
      num_before: edges from nodes of other subgraphs.
      waves: the subgraph's waves, if they are known.
    """

    head: int
    type: int
    nodes: np.ndarray
    num_before: int
    waves: Waves | None = None


class Links(NamedTuple):
    """The edges of a graph, by the numbers of its nodes.

    The nodes of one entry of `CellGraph.starts` are one subgraph here.

    Attributes:
      inner: int64 [nodes], the successor of each node in its own subgraph; `NO_SUCCESSOR`, or
        `SEVERAL`.
      outer: int64 [nodes], likewise, the head of the subgraph of its successor in another one.
      num_inner: int64 [nodes], the predecessors of each node in its own subgraph.
      max_steps: int64 [nodes], most times that each node runs.
      ahead: int64 [nodes], how many nodes follow each one in a line: those with the next numbers,
        each the only successor of the previous one, which is its only predecessor in the subgraph.
      alone: int64 [nodes], for how many tasks, from each node's own on, its line makes no other
        node ready; a large number if nothing follows the line, else the nodes that are left of it.
      several: node -> its successors (inner, outer), if it has several of either.
      entries: in the order in which subgraphs without a node before them are released.
      rows: int64 [6, nodes]: `inner`, `outer`, zeros, `num_inner`, `ahead` and `alone`.
    """

    inner: np.ndarray
    outer: np.ndarray
    num_inner: np.ndarray
    max_steps: np.ndarray
    ahead: np.ndarray
    alone: np.ndarray
    several: Mapping[int, tuple[Sequence[int], Sequence[int]]]
    entries: tuple[SubgraphEntry, ...]
    rows: np.ndarray


def _rows(
    inner: np.ndarray,
    outer: np.ndarray,
    num_inner: np.ndarray,
    ahead: np.ndarray,
    alone: np.ndarray,
) -> np.ndarray:
    return np.stack([inner, outer, np.zeros_like(inner), num_inner, ahead, alone])


def links_of(
    inner: Sequence[Sequence[int]],
    outer: Sequence[Sequence[int]],
    num_inner: Sequence[int],
    max_steps: Sequence[int],
    entries: tuple[SubgraphEntry, ...],
) -> Links:
    """Return the links of a graph; `outer` has the heads of each node's successors elsewhere."""
    inner_ones, outer_ones = _ones(inner), _ones(outer)
    num_before = np.array(num_inner, np.int64)
    ahead, alone = _lines(inner_ones, outer_ones, num_before)
    return Links(
        inner=inner_ones,
        outer=outer_ones,
        num_inner=num_before,
        max_steps=np.array(max_steps, np.int64),
        ahead=ahead,
        alone=alone,
        several={
            node: both
            for node, both in enumerate(zip(inner, outer, strict=True))
            if len(both[0]) > 1 or len(both[1]) > 1
        },
        entries=entries,
        rows=_rows(inner_ones, outer_ones, num_before, ahead, alone),
    )


def chain_links(type: int, num_nodes: int) -> Links:
    rows = np.empty((6, num_nodes), np.int64)
    rows[:] = _IN_CHAIN
    rows[0] = np.arange(1, num_nodes + 1)
    rows[0, -1] = NO_SUCCESSOR
    rows[3, 0] = 0
    rows[4] = np.arange(num_nodes)[::-1]
    inner, outer, _, num_inner, ahead, alone = rows
    entries = (SubgraphEntry(0, type, np.zeros(1, np.int64), 0),)
    max_steps = np.ones(num_nodes, np.int64)
    return Links(inner, outer, num_inner, max_steps, ahead, alone, {}, entries, rows)


def _lines(
    inner: np.ndarray, outer: np.ndarray, num_inner: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.arange(len(inner))
    goes_on = (inner == numbers + 1) & (outer == NO_SUCCESSOR)
    goes_on[:-1] &= num_inner[1:] == 1
    ends = np.flatnonzero(~goes_on)
    last = ends[np.searchsorted(ends, numbers)]
    frees = (inner[last] != NO_SUCCESSOR) | (outer[last] != NO_SUCCESSOR)
    ahead = last - numbers
    return ahead, np.where(frees, ahead + 1, _ANY_NUMBER)


def _ones(successors: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the successor of each node if it has one, else `NO_SUCCESSOR` or `SEVERAL`."""
    return np.array(
        [some[0] if len(some) == 1 else SEVERAL if some else NO_SUCCESSOR for some in successors],
        np.int64,
    )
