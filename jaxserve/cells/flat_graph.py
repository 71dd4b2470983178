"""Graphs as arrays, ready for a scheduler and an executor."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, final

import numpy as np

from jaxserve.cells.cell_graph import CellGraph
from jaxserve.cells.graph import Graph, Then, parts_of
from jaxserve.cells.graph_plan import (
    GraphPlan,
    LargeConstant,
    PlanBuilder,
    TreesOfASize,
    Wanted,
    WantedValues,
    plan_of_a_chain,
)
from jaxserve.cells.layout import Layout, TypeLayout, words_of, words_of_each
from jaxserve.cells.nodes import Chain, Node, Output, Steps, Tree
from jaxserve.core.errors import InvalidGraphError, TooManyNodesError, UnknownCellError

# Graphs of more calls than this are not looked up by their structure.
_MAX_CALLS = 8


class FlatGraph(NamedTuple):
    """A graph as arrays. A value is `node * Layout.stride + output`.

    Attributes:
      words: int32 [nodes, max_words], small constants.
      constants: large constants, each with a slot of the graph.
      keep: node and output -> value, for those that the next graph may take.
      kept: values of the previous graph that it takes, in that graph's numbering.
    """

    plan: GraphPlan
    words: np.ndarray
    constants: tuple[LargeConstant, ...]
    keep: Mapping[tuple[Node, int], int]
    kept: tuple[int, ...]
    then: Then | None

    @property
    def graph(self) -> CellGraph:
        return self.plan.graph

    @property
    def num_slots(self) -> tuple[int, ...]:
        return self.plan.num_slots

    @property
    def wanted(self) -> WantedValues:
        return self.plan.returned.wanted

    @property
    def num_nodes(self) -> int:
        return self.plan.num_nodes

    def pool_of(self, value: int, layout: Layout) -> int:
        node, output = divmod(value, layout.stride)
        return layout.types[self.graph.types[node]].output_pools[output]


def flatten(
    graph: Graph,
    layout: Layout,
    *,
    max_nodes: int,
    kept: Mapping[tuple[Node, int], int] | None = None,
) -> FlatGraph:
    """Return a graph as arrays.

    Args:
      kept: values of the previous graph that were kept.

    Raises:
      UnknownCellError: a cell is not one of the runtime's.
      TooManyNodesError: there are over `max_nodes` nodes.
      InvalidGraphError: an input is of a node of another graph, and was not kept.
    """
    if not isinstance(graph, Graph):
        raise InvalidGraphError(
            f"a {type(graph).__name__} was returned in place of a graph; return Graph(outputs=...)"
        )
    if graph.num_nodes > max_nodes:
        raise TooManyNodesError(
            f"the graph has {graph.num_nodes} nodes, and this runtime allows {max_nodes}; pass a "
            "shorter input, or create the runtime with a higher max_nodes"
        )
    key, node = _form_of(graph), graph.nodes[0]
    if key is not None and isinstance(node.block, Tree):
        plan = layout.plans.get(key) or _plan_of_a_tree(graph, layout, key)
        if plan is not None:
            return FlatGraph(plan, _words_of_a_tree(node.block, layout), (), {}, (), graph.then)
    elif key is not None:
        plan = layout.plans.get(key)
        if plan is not None:
            return FlatGraph(plan, _words_of_a_chain(node, layout), (), {}, (), graph.then)
    flat = _Flattener(graph, layout, kept or {}).flat_graph()
    if isinstance(node.block, Chain) and key is not None:
        if not flat.constants and _is_small(node, layout):
            layout.plans.add(key, flat.plan, 1)
    return flat


def _form_of(graph: Graph) -> Hashable | None:
    """Return the key of the plan of a tree, or of a chain with a form; None for other graphs.

    A chain's plan depends on more, unless it `_is_small`.
    """
    node = graph.nodes[0]
    block = node.block
    if block is None or block.form is None or len(graph.nodes) > 1 or graph.keep:
        return None
    structure = block.shape.key if isinstance(block, Tree) else block.num_nodes
    found: list[Hashable] = [block.form, structure]
    for name, result in graph.outputs.items():
        if type(result) is not Output or result.node is not node:
            return None
        found += (name, result.index)
    return tuple(found)


def _plan_of_a_tree(graph: Graph, layout: Layout, key: Hashable) -> GraphPlan | None:
    """Return the plan of one tree; None if its cells are unknown or equal, or constants large."""
    root = graph.nodes[0]
    tree = root.block
    assert isinstance(tree, Tree)
    leaf, pair = layout.index_of.get(tree.leaf.key), layout.index_of.get(root.cell.key)
    if leaf is None or pair is None or leaf == pair or None in layout.types[leaf].words:
        return None
    outputs = tuple(
        [
            (name, result.index)
            for name, result in graph.outputs.items()
            if isinstance(result, Output)
        ]
    )
    same = tree.form, tree.num_leaves, outputs
    trees = layout.plans.get(same) or layout.plans.add(
        same, TreesOfASize(layout, layout.types[leaf], layout.types[pair], tree, outputs), 1
    )
    return layout.plans.add(key, trees.plan(tree.shape), tree.num_nodes)


def _words_of_a_tree(tree: Tree, layout: Layout) -> np.ndarray:
    found = np.zeros((tree.num_nodes, layout.max_words), np.int32)
    t = layout.types[layout.index_of[tree.leaf.key]]
    for words, values in zip(t.words, tree.each, strict=True):
        if words is not None:
            found[: tree.num_leaves, words.start : words.stop] = words_of_each(values)
    return found


def _is_small(chain: Node, layout: Layout) -> bool:
    """Return whether all constants that differ between the nodes of a chain are small."""
    block, t = chain.block, layout.types[layout.index_of[chain.cell.key]]
    assert isinstance(block, Chain)
    pairs = zip(block.each, t.words, strict=True)
    return all(values is None or words is not None for values, words in pairs)


def _words_of_a_chain(chain: Node, layout: Layout) -> np.ndarray:
    block, t = chain.block, layout.types[layout.index_of[chain.cell.key]]
    assert isinstance(block, Chain) and block.form is not None
    if layout.max_words == t.num_words == 1:  # it is a constant of each node, since there is one
        return next(words_of_each(values) for values in block.each if values is not None)
    found = np.zeros((block.num_nodes, layout.max_words), np.int32)
    for number, words in enumerate(t.words):
        if words is None:
            continue
        columns, values = slice(words.start, words.stop), block.each[number]
        if values is not None:
            found[:, columns] = words_of_each(values)
        elif (value := block.form.inputs[number]) is not t.zeros[number]:
            found[:, columns] = words_of(np.asarray(value))
    return found


@final
class _Flattener:
    def __init__(self, graph: Graph, layout: Layout, kept: Mapping[tuple[Node, int], int]):
        self._graph = graph
        self._layout = layout
        self._known = kept
        self._types = [self._type_of(node) for node in graph.nodes]
        # The row of each node; for a chain or a tree, that of its last node.
        self._row_of: dict[Node, int] = {}
        end = 0
        for node in graph.nodes:
            end += node.num_nodes
            self._row_of[node] = end - 1

    def flat_graph(self) -> FlatGraph:
        graph, layout = self._graph, self._layout
        structure = self._structure()
        plan = None if structure is None else layout.plans.get(structure)
        if plan is not None:
            return FlatGraph(plan, self._words(), (), {}, (), graph.then)
        wanted = self._wanted()
        plan = self._plan_of_a_chain(structure, wanted)
        if plan is not None:
            return FlatGraph(plan, self._words(), (), {}, (), graph.then)
        builder = PlanBuilder(layout, self._row_of, self._known)
        for t, node in zip(self._types, graph.nodes, strict=True):
            builder.add(t, node)
        keep = {(one.node, one.index): self._value(one) for one in graph.keep}
        plan, constants = builder.plan(wanted, list(keep.values()))
        if structure is not None:
            layout.plans.add(structure, plan, plan.num_nodes)
        return FlatGraph(plan, self._words(), constants, keep, builder.kept, graph.then)

    def _type_of(self, node: Node) -> TypeLayout:
        layout = self._layout
        index = layout.index_of.get(node.cell.key)
        is_known = index is not None
        if isinstance(node.block, Tree):
            is_known = is_known and node.block.leaf.key in layout.index_of
        if index is None or not is_known:
            names = ", ".join(repr(t.cell.name) for t in layout.types)
            raise UnknownCellError(
                f"{node} is not of a cell of this runtime, whose cells are {names}; create the "
                "runtime with all cells"
            )
        return layout.types[index]

    def _wanted(self) -> WantedValues:
        found: list[tuple[int, Wanted]] = []
        for name, result in self._graph.outputs.items():
            if isinstance(result, Output | Steps):
                one = parts_of(result)[0]
                found.append((self._value(one), Wanted(name, is_steps=isinstance(result, Steps))))
            else:
                found += [(self._value(one), Wanted(name, i)) for i, one in enumerate(result)]
        return tuple(found)

    def _value(self, output: Output) -> int:
        row = self._row_of.get(output.node)
        if row is None:
            raise InvalidGraphError(
                f"the graph returns or keeps {output}, which an earlier graph computed; use it "
                "there, or pass it through a cell"
            )
        return row * self._layout.stride + output.index

    def _structure(self) -> Hashable | None:
        """Return the key of the plan, for graphs of chains and few calls; None for other graphs.

        It is also None for graphs with large constants, trees, or values of another graph.
        """
        nodes = self._graph.nodes
        if len(nodes) > _MAX_CALLS or self._graph.keep or isinstance(nodes[0].block, Tree):
            return None
        found: list[Hashable] = []
        for name, result in self._graph.outputs.items():
            values = tuple([self._value(one) for one in parts_of(result)])
            found += (name, type(result), values)
        for t, node in zip(self._types, nodes, strict=True):
            block = node.block
            if isinstance(block, Tree):
                return None
            found += (t.index, node.max_steps, node.num_nodes)
            if block is not None:
                found.append(block.carry)
                for each, words in zip(block.each, t.words, strict=True):
                    if each is not None and words is None:
                        return None
            for number, value in enumerate(node.inputs):
                if type(value) is Output:
                    row = self._row_of.get(value.node)
                    if row is None:
                        return None
                    found.append((row, value.index))
                elif t.words[number] is not None or value is t.zeros[number]:
                    found.append(None)
                else:
                    return None
        return tuple(found)

    def _plan_of_a_chain(
        self, structure: Hashable | None, wanted: WantedValues
    ) -> GraphPlan | None:
        chain = self._graph.nodes[0].block
        if structure is None or not isinstance(chain, Chain) or len(self._graph.nodes) > 1:
            return None
        plan = plan_of_a_chain(self._layout, self._types[0], chain, wanted)
        return self._layout.plans.add(structure, plan, plan.num_nodes)

    def _words(self) -> np.ndarray:
        layout = self._layout
        found = np.zeros((self._graph.num_nodes, layout.max_words), np.int32)
        end = 0
        for t, node in zip(self._types, self._graph.nodes, strict=True):
            begin, end, block = end, end + node.num_nodes, node.block
            each: tuple[np.ndarray | None, ...] = ()
            if isinstance(block, Tree):
                t, each = layout.types[layout.index_of[block.leaf.key]], block.each
                rows = slice(begin, begin + block.num_leaves)
            else:
                rows = slice(begin, end)
                if block is not None:
                    each = block.each
            for number, words in enumerate(t.words):
                if words is None:
                    continue
                columns = slice(words.start, words.stop)
                if each and (values := each[number]) is not None:
                    found[rows, columns] = words_of_each(values)
                elif type(value := node.inputs[number]) is int:
                    found[rows, columns] = value
                elif type(value) is not Output:
                    constant: Any = value
                    found[rows, columns] = words_of(np.asarray(constant))
        return found
