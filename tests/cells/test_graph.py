"""Graphs are checked as they are built, and errors name the node and the cell."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from jaxserve.cells import Graph, SimulatedCell
from jaxserve.cells.flat_graph import FIRST_SLOT, FlatGraph, flatten
from jaxserve.cells.values import ValueSpec
from jaxserve.core.errors import (
    CyclicGraphError,
    EmptyGraphError,
    InputMismatchError,
    InvalidCellError,
    InvalidGraphError,
    MissingInputError,
    TooManyNodesError,
    UnknownCellError,
    UnknownInputError,
)
from tests.cells.examples import (
    STATE,
    TOKEN,
    chain,
    chain_cell,
    check_links,
    layout_of,
    leaf_cell,
    loop_cell,
    merge_cell,
    tree,
)

SMALL = ValueSpec((2,), np.dtype(np.float32))
TWO = SimulatedCell("two", {"x": TOKEN}, {"a": SMALL, "b": SMALL})


def test_a_missing_input_is_named():
    """The error names the node, the cell and the input."""
    cell = chain_cell()
    first = cell(x=1, h=0.0)
    with pytest.raises(MissingInputError, match=r"node chain\[1\] of cell 'chain'.*'x'"):
        cell(h=first["h"])


def test_an_unknown_input_or_output_is_named():
    """The error lists what the cell has."""
    cell = chain_cell()
    with pytest.raises(UnknownInputError, match="'y'.*'x', 'h'"):
        cell(x=1, h=0.0, y=2)
    with pytest.raises(UnknownInputError, match="no output 'c'.*'h'"):
        cell(x=1, h=0.0)["c"]


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(3, np.float32),
        np.zeros(4, np.float64),
        "text",
        None,
        merge_cell()(left=0.0, right=0.0),
        TWO(x=1),
        leaf_cell()(x=1)["h"].node.inputs,
    ],
)
def test_a_value_of_another_shape_or_dtype_is_refused(value):
    """An array must fit exactly; a node of several outputs is not one of them."""
    cell = SimulatedCell("scaled", {"x": TOKEN, "h": SMALL}, {"h": SMALL})
    with pytest.raises(InputMismatchError, match=r"input 'h'.*float32\[2\]"):
        cell(x=1, h=value)


def test_a_node_stands_for_its_output():
    """For its only one, or for the one with the input's name; a single input needs no name."""
    embed, cell = leaf_cell("embed"), merge_cell()
    loop = loop_cell()
    names = {"left": STATE, "other": STATE}
    several = SimulatedCell("several", {"h": STATE}, names)
    nodes = [cell(left=embed(3), right=several(loop(embed(4), max_steps=2))["other"])]
    first, other = loop(h=embed(x=4)["h"], max_steps=2), embed(x=3)
    nodes.append(cell(left=other["h"], right=several(h=first["h"])["other"]))
    layout = layout_of(embed, cell, loop, several)
    found, called = [flatten(Graph({"h": one["h"]}), layout, max_nodes=9) for one in nodes]
    assert found.graph is called.graph
    _assert_equal(found, called)
    node = several(embed(1))
    assert cell(left=node, right=0.0).inputs[0].index == 0
    with pytest.raises(InputMismatchError, match="'left', 'other', none of them named 'right'"):
        cell(left=0.0, right=node)


def test_inputs_without_a_name_are_refused_if_there_are_several():
    with pytest.raises(UnknownInputError, match="2 inputs without a name.*'left', 'right'"):
        merge_cell()(0.0, 0.0)
    for given in ({"x": 1}, {"y": 1}):
        with pytest.raises(UnknownInputError, match="1 inputs without a name"):
            leaf_cell()(3, **given)


@pytest.mark.parametrize("value", [2**31, 1.5, np.int64(1)])
def test_a_number_must_fit_the_dtype(value):
    """An int fits int32 if it is small enough; a float does not."""
    with pytest.raises(InputMismatchError, match="input 'x'"):
        chain_cell()(x=value, h=0.0)


def test_an_output_of_another_shape_is_refused():
    cell = chain_cell()
    with pytest.raises(InputMismatchError, match=r"output 'h' of node chain\[0\].*int32\[\]"):
        cell(x=cell(x=1, h=0.0)["h"], h=0.0)


def test_a_graph_needs_nodes():
    """A graph without outputs, or with an output that is not of a node, is refused."""
    with pytest.raises(EmptyGraphError):
        Graph(outputs={})
    with pytest.raises(InvalidGraphError, match="'a'.*int"):
        Graph(outputs={"a": 3})
    with pytest.raises(InvalidGraphError, match="'a'.*list"):
        Graph(outputs={"a": []})


def test_a_cycle_is_found():
    """Only a list of edges can have one."""
    merge = merge_cell()
    inputs = [{"left": (1, "h"), "right": 0.0}, {"left": (0, "h"), "right": 0.0}]
    found = r"^node 0 \(cell 'merge'\) depends on itself through node 1 \(cell 'merge'\);"
    with pytest.raises(CyclicGraphError, match=found):
        Graph.from_edges([merge, merge], inputs, {"h": (1, "h")})
    ring = [{"left": (1, "h"), "right": 0.0}, *({"left": (1 + n % 99, "h")} for n in range(1, 100))]
    with pytest.raises(CyclicGraphError, match=r"^node 1 .* through node 2 .*node 8 .*, others;"):
        Graph.from_edges([merge] * 100, ring, {"h": (1, "h")})
    with pytest.raises(CyclicGraphError, match=r"^node 1 \(cell 'merge'\) depends on itself;"):
        Graph.from_edges([merge] * 2, [ring[0], {"left": (1, "h")}], {"h": (1, "h")})


def test_references_of_edges_are_checked():
    """Each has the index of a node and the name of one of its outputs."""
    merge = merge_cell()
    for reference in (("a", "h"), (0, 1), (0,), (0, "h", "h"), (0.0, "h")):
        inputs = [{"left": 0.0, "right": 0.0}, {"left": reference, "right": 0.0}]
        with pytest.raises(InvalidGraphError, match=r"node 1: input 'left' is \(.*pass \(index"):
            Graph.from_edges([merge] * 2, inputs, {"h": (1, "h")})
        given: Any = {"h": reference}
        with pytest.raises(InvalidGraphError, match=r"output 'h' is \("):
            Graph.from_edges([merge], inputs[:1], given)
    with pytest.raises(InvalidGraphError, match="node 7"):
        Graph.from_edges([merge], [{"left": (7, "h"), "right": 0.0}], {"h": (0, "h")})
    with pytest.raises(MissingInputError, match="node 0: "):
        Graph.from_edges([merge], [{"left": 0.0}], {"h": (0, "h")})
    with pytest.raises(InvalidGraphError, match="output 'h' is of node 1"):
        Graph.from_edges([merge], [{"left": 0.0, "right": 0.0}], {"h": (1, "h")})
    with pytest.raises(InvalidGraphError, match="1 cells and the inputs of 0"):
        Graph.from_edges([merge], [], {"h": (0, "h")})


def test_a_graph_of_edges_is_that_of_calls():
    """Nodes may come in any order."""
    merge = merge_cell()
    inputs = [{"left": (1, "h"), "right": 0.0}, {"left": 1.0, "right": 0.0}]
    graph = Graph.from_edges([merge, merge], inputs, {"h": (0, "h")})
    assert len(graph.nodes) == 2
    assert flatten(graph, layout_of(merge), max_nodes=9).graph.predecessors == ((), (0,))


@pytest.mark.parametrize("size, length", [(1, 5), (20, 5), (1, 1)])
def test_a_chain_is_the_graph_of_its_calls(size: int, length: int):
    """For constants that travel with the task, and for those in slots, with a shared input."""
    spec = ValueSpec((size,), np.dtype(np.float32))
    cell = SimulatedCell("cell", {"x": spec, "h": spec, "w": spec}, {"h": spec})
    given = np.random.default_rng(0).normal(size=(length, size)).astype(np.float32)
    given[3:4] = 0
    shared = cell(x=given[0], h=0.0, w=0.0)
    node = cell(x=given[0], h=0.0, w=shared["h"])
    for value in given[1:]:
        node = cell(x=value, h=node["h"], w=shared["h"])
    other = cell(x=given[0], h=0.0, w=0.0)
    chained = cell.chain({"x": given}, {"h": "h"}, h=0.0, w=other["h"])
    graphs = [Graph({"h": node["h"]}), Graph({"h": chained["h"]})]
    called, found = [flatten(graph, layout_of(cell), max_nodes=9) for graph in graphs]
    assert found.graph.predecessors == called.graph.predecessors
    assert found.num_nodes == length + 1
    _assert_equal(found, called)
    again = cell.chain({"x": given}, {"h": "h"}, h=0.0, w=0.0)
    with pytest.raises(TooManyNodesError, match=f"{length} nodes.*0"):
        Graph({"h": again["h"]}, max_nodes=0)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_chain_alone_is_the_graph_of_its_calls(length: int):
    """Its plan is made without a pass over its nodes, and is the same."""
    names = ("h", "c", "o")
    cell = SimulatedCell("cell", {"x": TOKEN, "c": STATE, "h": STATE}, dict.fromkeys(names, STATE))
    node = cell(x=0, h=0.0, c=0.0)
    for number in range(1, length):
        node = cell(x=number, h=node["h"], c=node["c"])
    chained = cell.chain({"x": range(length)}, {"h": "h", "c": "c"}, h=0.0, c=0.0)
    called, found = [
        flatten(Graph({"c": last["c"]}), layout_of(cell), max_nodes=9) for last in (node, chained)
    ]
    assert found.graph.predecessors == called.graph.predecessors
    assert found.num_slots == called.num_slots
    is_slot = called.plan.codes >= FIRST_SLOT
    np.testing.assert_array_equal(found.plan.codes >= FIRST_SLOT, is_slot)
    np.testing.assert_array_equal(found.plan.codes[~is_slot], called.plan.codes[~is_slot])
    np.testing.assert_array_equal(found.words, called.words)


def _assert_equal(found: FlatGraph, called: FlatGraph) -> None:
    np.testing.assert_array_equal(found.plan.codes, called.plan.codes)
    np.testing.assert_array_equal(found.plan.types, called.plan.types)
    np.testing.assert_array_equal(found.words, called.words)
    assert found.num_slots == called.num_slots
    assert found.wanted == called.wanted
    for (_, _, ours), (_, _, theirs) in zip(found.constants, called.constants, strict=True):
        np.testing.assert_array_equal(ours, theirs)


PAIRS = [(0, 1), (2, 3), (5, 4), (6, 7)]


@pytest.mark.parametrize("size", [1, 20])
def test_a_tree_is_the_graph_of_its_calls(size: int):
    """Alone, beside another node, and with constants in slots."""
    spec = ValueSpec((size,), np.dtype(np.float32))
    leaf = SimulatedCell("leaf", {"x": spec}, {"h": STATE, "c": STATE})
    names = ("lh", "lc", "rh")
    pair = SimulatedCell("pair", dict.fromkeys(names, STATE), {"c": STATE, "h": STATE, "o": STATE})
    given = np.random.default_rng(0).normal(size=(5, size)).astype(np.float32)
    sides = {"left": {"lh": "h", "lc": "c"}, "right": {"rh": "h"}}
    graphs = []
    for is_alone in (True, False):
        nodes = [leaf(x=value) for value in given]
        for left, right in PAIRS:
            taken: Any = {"lh": nodes[left]["h"], "lc": nodes[left]["c"], "rh": nodes[right]["h"]}
            nodes.append(pair(**taken))
        roots = nodes[-1], pair.tree(leaf, {"x": given}, PAIRS, **sides)
        for root in roots:
            other = [] if is_alone else [pair(lh=root["h"], lc=0.0, rh=0.0)["o"]]
            graphs.append(Graph({"o": [root["o"], *other], "h": root["h"]}))
    layout = layout_of(leaf, pair)
    for called, found in zip(graphs[::2], graphs[1::2], strict=True):
        called, found = [flatten(graph, layout, max_nodes=10) for graph in (called, found)]
        # The order of calls differs from that of a tree's numbers, and so do the slots.
        assert sorted(found.plan.types) == sorted(called.plan.types)
        assert len(found.constants) == len(called.constants)
        assert sorted(map(len, found.graph.predecessors)) == sorted(
            map(len, called.graph.predecessors)
        )
        check_links(found.graph)
    single = pair.tree(leaf, {"x": given[:1]}, [], **sides)
    assert single.cell is leaf


def test_trees_of_one_size_share_what_does_not_depend_on_their_pairs():
    """Every pair reads what the nodes that it joins have written, and so does the graph."""
    leaf = SimulatedCell("leaf", {"x": TOKEN}, {"h": STATE, "c": STATE})
    names = ("lh", "lc", "rh")
    pair = SimulatedCell("pair", dict.fromkeys(names, STATE), {"c": STATE, "h": STATE, "o": STATE})
    sides = {"left": {"lh": "h", "lc": "c"}, "right": {"rh": "h"}}
    layout = layout_of(leaf, pair)
    plans = []
    for pairs in (PAIRS, [(3, 4), (2, 5), (1, 6), (0, 7)], [(1, 0), (5, 2), (4, 3), (7, 6)]):
        root = pair.tree(leaf, {"x": range(5)}, pairs, **sides)
        flat = flatten(Graph({"o": root["o"], "h": root["h"]}), layout, max_nodes=9)
        plans.append(flat.plan)
        assert flat.words[:5, 0].tolist() == list(range(5))
        held: dict[int, tuple[int, str]] = {}  # the value that each slot has
        for node, codes in enumerate(flat.plan.codes.tolist()):
            if node >= 5:
                left, right = pairs[node - 5]
                assert [held[code] for code in codes[:3]] == [
                    (left, "h"),
                    (left, "c"),
                    (right, "h"),
                ]
            outputs = layout.types[flat.plan.types[node]].cell.outputs
            for name, code in zip(outputs, codes[layout.first_output :], strict=False):
                if code >= FIRST_SLOT:
                    held[code] = node, name
        for value, wanted in flat.wanted:
            node, output = divmod(value, layout.stride)
            assert held[flat.plan.codes[node, layout.first_output + output]] == (8, wanted.name)
    assert plans[0].types is plans[1].types is plans[2].types


@pytest.mark.parametrize(
    "error, given, pairs, left",
    [
        (UnknownInputError, {"x": [1, 2], "y": [1]}, [(0, 1)], {"left": "h"}),
        (MissingInputError, {"x": [1, 2]}, [(0, 1)], {}),
        (InputMismatchError, {"x": [1.5, 2.5]}, [(0, 1)], {"left": "h"}),
        (InputMismatchError, {"x": [1, 2]}, [(0, 1)], {"left": "c"}),
        (InvalidGraphError, {"x": []}, [], {"left": "h"}),
        (InvalidGraphError, {"x": [1, 2]}, [], {"left": "h"}),
        (InvalidGraphError, {"x": [1, 2]}, [(0, 2)], {"left": "h"}),
        (InvalidGraphError, {"x": [1, 2]}, [(0, 0)], {"left": "h"}),
        (InvalidGraphError, {"x": [1, 2, 3]}, [(0, 4), (1, 2)], {"left": "h"}),
    ],
)
def test_a_tree_is_checked(error, given, pairs, left):
    """Its leaves' inputs, the outputs that pairs take, and pairs that are not a tree."""
    with pytest.raises(error, match="merge|leaf"):
        merge_cell().tree(leaf_cell(), given, pairs, left=left, right={"right": "h"})


@pytest.mark.parametrize(
    "error, given, carry, inputs",
    [
        (UnknownInputError, {"x": [1], "y": [1]}, {"h": "h"}, {"h": 0.0}),
        (MissingInputError, {"x": [1]}, {"h": "h"}, {}),
        (InputMismatchError, {"x": [1.5]}, {"h": "h"}, {"h": 0.0}),
        (InputMismatchError, {"x": [2**40]}, {"h": "h"}, {"h": 0.0}),
        (InputMismatchError, {"x": [1]}, {"x": "h"}, {"h": 0.0}),
        (InvalidGraphError, {"x": []}, {"h": "h"}, {"h": 0.0}),
        (InvalidGraphError, {"x": [1]}, {}, {"h": 0.0}),
    ],
)
def test_a_chain_is_checked(error, given, carry, inputs):
    """Inputs that a call refuses, chains of no length, and nothing to carry."""
    with pytest.raises(error, match="chain"):
        chain_cell().chain(given, carry, **inputs)


def test_too_many_nodes_are_refused():
    """The limit of a graph, and that of a runtime."""
    cell = chain_cell()
    node = cell(x=0, h=0.0)
    for _ in range(20):
        node = cell(x=0, h=node["h"])
    with pytest.raises(TooManyNodesError, match="21 nodes.*20"):
        Graph(outputs={"h": node["h"]}, max_nodes=20)
    with pytest.raises(TooManyNodesError, match="21 nodes.*20"):
        flatten(Graph(outputs={"h": node["h"]}), layout_of(cell), max_nodes=20)


def test_a_cell_of_another_runtime_is_refused():
    """The error names the node and the runtime's cells."""
    graph = chain(chain_cell(), 2)
    with pytest.raises(UnknownCellError, match=r"chain\[0\].*'merge'"):
        flatten(graph, layout_of(merge_cell()), max_nodes=9)


def test_a_node_belongs_to_one_graph():
    """A later graph may take an output of it only if it was kept."""
    cell = chain_cell()
    first = cell(x=0, h=0.0)
    Graph(outputs={"h": first["h"]})
    after = Graph(outputs={"h": cell(x=0, h=first["h"])["h"]})
    assert len(after.nodes) == 1
    with pytest.raises(InvalidGraphError, match="keep"):
        flatten(after, layout_of(cell), max_nodes=9)


def test_graphs_of_one_structure_share_a_plan():
    """So do those that keep values, and those that take them."""
    cell = chain_cell()
    layout, plans = layout_of(cell), []
    for token in (3, 5):
        first = cell(x=token, h=0.0)
        flat = flatten(Graph({"h": first["h"]}, keep=[first["h"]]), layout, max_nodes=9)
        after = Graph({"h": cell(x=token, h=first["h"])["h"]})
        taken = flatten(after, layout, max_nodes=9, kept=flat.keep)
        assert flat.words.tolist() == taken.words.tolist() == [[token, 0, 0, 0, 0]]
        assert taken.kept == tuple(flat.keep.values()) == (0,)
        plans.append((flat.plan, taken.plan))
    (first, after), again = plans
    assert again[0] is first and again[1] is after and first is not after


def test_only_emitted_outputs_have_steps():
    """A loop's other outputs, and other nodes, have none."""
    with pytest.raises(UnknownInputError, match="does not emit 'h'"):
        loop_cell()(h=0.0, max_steps=3).steps("h")


def test_batch_sizes_increase():
    with pytest.raises(InvalidCellError, match="batch_sizes"):
        chain_cell(batch_sizes=(4, 2))


def test_cells_of_one_type_agree():
    """Two cells with one key and different priorities are refused."""
    with pytest.raises(InvalidCellError, match="priorities"):
        layout_of(chain_cell(), chain_cell(priority=1))


def test_constants_are_those_of_the_call():
    """An array that is filled again for the next node gives each node its own values."""
    spec = ValueSpec((20,), np.dtype(np.float32))
    cell = SimulatedCell("large", {"x": spec, "h": spec}, {"h": spec})
    buffer, node = np.zeros(20, np.float32), None
    for number in (1, 2, 1, 0):
        buffer[:] = number
        node = cell(x=buffer, h=0.0 if node is None else node["h"])
    assert node is not None
    flat = flatten(Graph({"h": node["h"]}), layout_of(cell), max_nodes=9)
    # Equal ones share a slot, and zeros need none.
    assert [array[0] for _, _, array in flat.constants] == [1, 2]
    assert flat.num_slots == (3,)


def test_constants_are_stored_once():
    """Small constants travel with the task."""
    cell = merge_cell()
    given = np.ones(4, np.float32)
    first = cell(left=given, right=np.zeros(4, np.float32))
    graph = Graph(outputs={"h": cell(left=first["h"], right=given)["h"]})
    flat = flatten(graph, layout_of(cell), max_nodes=9)
    assert flat.constants == ()
    assert flat.graph.links.heads.tolist() == [0, 0]


def test_what_a_tree_needs():
    """Every value of a tree is taken once; most live when all leaves and no inner node have run."""
    leaf, merge = leaf_cell(), merge_cell()
    flat = flatten(tree(leaf, merge, 4), layout_of(leaf, merge), max_nodes=9)
    assert flat.num_nodes == 7
    assert flat.num_slots == (0, 4)


def test_what_a_chain_needs():
    """The last state alone lives; all of them if the graph returns all."""
    cell = chain_cell()
    assert flatten(chain(cell, 9), layout_of(cell), max_nodes=9).num_slots == (0, 1)
    nodes = [cell(x=0, h=0.0)]
    for _ in range(3):
        nodes.append(cell(x=0, h=nodes[-1]["h"]))
    graph = Graph({"all": [node["h"] for node in nodes]})
    assert flatten(graph, layout_of(cell), max_nodes=9).num_slots == (0, 4)


def test_graphs_and_policies_load_no_jax():
    """Policies are tested and simulated without JAX."""
    modules = ("batchmaker", "simulation", "graph", "flat_graph", "value_table")
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(f'jaxserve.cells.{{name}}')\n"
        "sys.exit(', '.join({'jax', 'jaxlib', 'flax', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
