"""The slots that a graph takes are enough, in whatever order its nodes run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.cells.flat_graph import flatten
from jaxserve.cells.layout import NUM_RESERVED_SLOTS, TRASH_SLOT
from jaxserve.cells.value_table import ValueTable
from tests.cells.examples import layout_of, random_graphs, three_cells

pytestmark = pytest.mark.fast

CELLS = three_cells()


@given(graph=random_graphs(CELLS), seed=st.integers(0, 1000))
def test_a_slot_holds_its_value_until_nothing_takes_it(graph, seed):
    """Random tasks of ready nodes of one type read what the nodes before them wrote."""
    layout, random = layout_of(*CELLS), np.random.default_rng(seed)
    flat = flatten(graph, layout, max_nodes=99)
    num_slots = tuple(num + NUM_RESERVED_SLOTS for num in flat.num_slots)
    table = ValueTable(layout, 1, num_slots)
    table.add(flat, 8, 0)
    table.check_integrity()
    structure = flat.graph
    has_run = np.zeros(flat.num_nodes, bool)
    # The node whose output each slot of states holds.
    held: dict[int, int] = {}
    while not has_run.all():
        ready = [
            node
            for node, before in enumerate(structure.predecessors)
            if not has_run[node] and has_run[list(before)].all()
        ]
        first = random.choice(ready)
        nodes = [n for n in ready if structure.types[n] == structure.types[first]]
        nodes = np.array(nodes)[: random.integers(1, len(nodes) + 1)]
        rows = table.rows_of(structure.types[first], nodes + 8)
        for node, row in zip(nodes.tolist(), rows, strict=True):
            taken = [held[slot] for slot in row[: layout.max_inputs] if slot in held]
            assert set(taken) == set(structure.predecessors[node])
        for node, row in zip(nodes.tolist(), rows, strict=True):
            if row[layout.first_output] != TRASH_SLOT:
                held[int(row[layout.first_output])] = node
        has_run[nodes] = True
    wanted = np.array([value for value, _ in flat.wanted])
    _, slots = table.places_of(wanted + 8 * layout.stride)
    assert [held[slot] for slot in slots.tolist()] == (wanted // layout.stride).tolist()
    table.shrink(flat, 8, wanted.tolist())
    table.remove(8)
    table.check_integrity()
