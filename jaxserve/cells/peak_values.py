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
    held = np.flatnonzero(uses > 0)
    takers, places = np.nonzero(sources >= 0)
    if graph.loop_types:
        is_step = np.array([type not in graph.loop_types for type in graph.types])[takers]
        takers, places = takers[is_step], places[is_step]
    values = sources[takers, places]
    num_taken = np.bincount(values, minlength=len(uses))
    is_freed = num_taken == uses
    last = np.zeros(len(uses), np.int64)
    last[values] = takers  # of equal indices the last assignment counts
    is_freed[values[last[values] != takers]] = False
    is_freed[num_nodes * stride :] = False
    after = [-1] * num_nodes
    for node, before in enumerate(graph.predecessors):
        for other in before:
            after[other] = node
    peaks = np.zeros(num_pools, np.int64)
    held_pools = pools[held]
    for pool in set(held_pools.tolist()):
        mine = held[held_pools == pool]
        net = np.bincount(mine // stride, minlength=num_nodes)
        np.subtract.at(net, last[mine[is_freed[mine]]], 1)
        peaks[pool] = net[num_nodes:].sum() + _largest_sum(net[:num_nodes].tolist(), after)
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
