"""How many values of a graph may live at the same time, in whatever order its nodes run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.cells.cell_graph import CellGraph


def peak_values(
    graph: CellGraph,
    sources: np.ndarray,  # [nodes, max_inputs]
    uses: np.ndarray,  # [rows * stride]
    pools: np.ndarray,  # [rows * stride]
    *,
    stride: int,
    num_pools: int,
) -> np.ndarray:
    """Return an upper bound of the live values of each pool, int64 [pools]; see `FlatGraph`.

    A value lives from the submission of its node to that of the last node that takes it. Nodes run
    in any order that their dependencies allow, so those that have run are a set that has, with each
    node, all nodes before it. The bound is the most values that such a set may leave alive: the
    outputs of its nodes, without the values that only one of its nodes takes. It is the exact peak
    of chains and trees. Values that several nodes or a loop take, and large constants, count as
    live until the graph is removed.
    """
    num_nodes = len(graph)
    held = (uses > 0) & (pools >= 0)
    takes = sources >= 0
    takes[np.isin(graph.types, list(graph.loop_types))] = False
    takers, values = np.nonzero(takes)[0], sources[takes]
    first, last = np.full(len(uses), -1), np.full(len(uses), -2)
    first[values[::-1]] = takers[::-1]
    last[values] = takers  # of equal indices the last assignment counts
    is_freed = held & (first == last) & (np.bincount(values, minlength=len(uses)) == uses)
    is_freed[num_nodes * stride :] = False
    after = [others[0] if others else -1 for others in graph.successors]
    peaks = np.zeros(num_pools, np.int64)
    for pool in np.unique(pools[held]).tolist():
        mine = np.flatnonzero(held & (pools == pool))
        rows = mine // stride
        num_constants = int((rows >= num_nodes).sum())
        net = np.bincount(rows[rows < num_nodes], minlength=num_nodes)
        net -= np.bincount(last[mine[is_freed[mine]]], minlength=num_nodes)
        peaks[pool] = num_constants + _largest_sum(net.tolist(), after)
    return peaks


def _largest_sum(net: Sequence[int], after: Sequence[int]) -> int:
    """Return the largest sum of a set that has, with each node, those before it.

    Args:
      after: of each node one that follows it, with a higher number; -1 for none. With one follower
        of each node the dependencies are trees, and a node is worth taking with all before it or
        not at all. Dependencies that are left out only allow more sets.
    """
    whole, best, total = list(net), [0] * len(net), 0
    for node, follower in enumerate(after):
        sum_of_all = whole[node]
        most = max(best[node], sum_of_all)
        if follower < 0:
            total += most
        else:
            whole[follower] += sum_of_all
            best[follower] += most
    return total
