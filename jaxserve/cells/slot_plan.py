"""Which slot of its graph each value takes, so that no slot is chosen while the graph runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from jaxserve.cells.cell_graph import CellGraph
from jaxserve.cells.layout import Layout

# Slots that are free when a node runs, by pool.
_Spare: TypeAlias = "dict[int, list[int]]"


def plan_slots(
    layout: Layout, graph: CellGraph, sources: Sequence[Sequence[int]], uses: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Return a slot for every value that is taken, which holds in any order that nodes may run in.

    A node's outputs take the slots of the inputs that nothing else takes, in their order; so the
    states of a chain stay where they are, and an inner node of a tree takes the slots of its left
    child. Slots that it leaves over go to one node that follows it. For chains and trees these are
    the fewest slots with which every order runs. Values that several nodes or a loop take keep
    their slots until the graph is removed.

    Args:
      sources: for each node the value of each input; negative for constants.
      uses: how often each value is taken or returned.

    Returns:
      The slot of each value in its pool, -1 for those that nothing takes; the slot of each node's
      flag, -1 for nodes that are no loops; and the number of slots of each pool.
    """
    stride = layout.stride
    num_slots = [0] * len(layout.pools)
    slots = [-1] * len(uses)
    flags = [-1] * len(graph)
    followers = graph.followers
    spare: list[_Spare | None] = [None] * len(graph)

    def new(pool: int) -> int:
        num_slots[pool] += 1
        return num_slots[pool] - 1

    for node, type in enumerate(graph.types):
        t = layout.types[type]
        free = spare[node] or {}
        own: _Spare = {}
        if not t.is_loop:
            taken = sources[node]
            for number, value in enumerate(taken[: t.num_inputs]):
                if value >= 0 and taken.count(value) == uses[value]:
                    mine = own.setdefault(t.input_pools[number], [])
                    if slots[value] not in mine:
                        mine.append(slots[value])
        for value, pool in enumerate(t.output_pools, node * stride):
            if uses[value]:
                given = own.get(pool)
                if given:
                    slots[value] = given.pop(0)
                else:
                    given = free.get(pool)
                    slots[value] = given.pop() if given else new(pool)
        if t.is_loop:
            assert layout.done_pool is not None
            flags[node] = new(layout.done_pool)
        if followers[node] >= 0 and (free or own):
            spare[followers[node]] = _joined(_joined(free, own), spare[followers[node]])
    return slots, flags, num_slots


def _joined(some: _Spare, others: _Spare | None) -> _Spare:
    """Return the slots of both, either of which may be changed."""
    if not others:
        return some
    for pool, slots in others.items():
        given = some.get(pool)
        if not given:
            some[pool] = slots
        elif len(given) < len(slots):
            slots += given
            some[pool] = slots
        else:
            given += slots
    return some
