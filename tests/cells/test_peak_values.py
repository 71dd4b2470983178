"""The slots that a graph reserves are enough, in whatever order its nodes run."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.cells.flat_graph import flatten
from jaxserve.cells.layout import NUM_RESERVED_SLOTS
from jaxserve.cells.value_table import ValueTable
from tests.cells.examples import layout_of, random_graphs, three_cells

CELLS = three_cells()


@settings(max_examples=200, deadline=None)
@given(graph=random_graphs(CELLS), seed=st.integers(0, 1000))
def test_live_values_fit_in_the_reserved_slots(graph, seed):
    """Random tasks of ready nodes of one type take no slot that the graph has not reserved.

    `ValueTable` has no other slots, and checks that one is free.
    """
    layout, random = layout_of(*CELLS), np.random.default_rng(seed)
    flat = flatten(graph, layout, max_nodes=99)
    table = ValueTable(layout, 1, tuple((flat.num_slots + NUM_RESERVED_SLOTS).tolist()))
    table.add(flat, 8, 0)
    structure = flat.graph
    has_run = np.zeros(flat.num_nodes, bool)
    while not has_run.all():
        ready = [
            node for node, before in enumerate(structure.predecessors)
            if not has_run[node] and has_run[list(before)].all()
        ]  # fmt: skip
        first = random.choice(ready)
        nodes = [n for n in ready if structure.types[n] == structure.types[first]]
        nodes = np.array(nodes)[: random.integers(1, len(nodes) + 1)]
        t = layout.types[structure.types[first]]
        table.fill(0, t, nodes + 8, np.zeros((t.num_rows, len(nodes)), np.int32))
        has_run[nodes] = True
        table.check_integrity()
    kept = [value for value, _ in flat.wanted]
    table.shrink(flat, 8, kept)
    assert len(table.workers[0].pools[1]) == flat.num_slots[1] - len(set(kept))
    table.remove(flat, 8)
    table.check_integrity()
