"""Graphs as arrays, ready for a scheduler and an executor: what each node reads and writes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias, final

import numpy as np

from jaxserve.cells.cell_graph import CellGraph, chain_graph, tree_graph
from jaxserve.cells.graph import Chain, Graph, Node, Output, Steps, Then, Tree, parts_of
from jaxserve.cells.layout import CellLayout, TypeLayout, words_of_each
from jaxserve.cells.tree_shape import TreeShape
from jaxserve.core.errors import InvalidGraphError, TooManyNodesError, UnknownCellError

# Codes of inputs and outputs without a slot of the graph, and the first code with one.
ZEROS, TRASH, WORDS, FIRST_SLOT = 0, 1, 2, 3
# Sources of inputs: the first two entries of `_Flattener._others`.
_FROM_ZEROS, _FROM_WORDS = -1, -2


@final
@dataclass(frozen=True)
class Wanted:
    """A value that a graph returns under `name`, or with `is_steps` the values of all steps.

    `member` is its number in a list of values; None for a single value.
    """

    name: str
    member: int | None = None
    is_steps: bool = False


# (value, what it is for); a value is `node * CellLayout.stride + output`.
WantedValues: TypeAlias = "tuple[tuple[int, Wanted], ...]"
# A large constant: its pool, its code, and its array.
LargeConstant: TypeAlias = "tuple[int, int, np.ndarray]"


@final
class Returned:
    """The values that graphs return, in the forms that requests and executors need.

    Attributes:
      wanted_for: what each value is for.
      values: those that are not the steps of a loop.
      reads: (node, value) of each value to read when its node has run; without loops.
    """

    __slots__ = ("wanted", "wanted_for", "values", "reads")

    def __init__(self, wanted: WantedValues, stride: int, loops: Sequence[int]):
        self.wanted = wanted
        self.wanted_for: dict[int, list[Wanted]] = {}
        for value, one in wanted:
            self.wanted_for.setdefault(value, []).append(one)
        self.values = tuple(dict.fromkeys([value for value, one in wanted if not one.is_steps]))
        pairs = [(value // stride, value) for value in self.values]
        self.reads = tuple([pair for pair in pairs if pair[0] not in loops])


class GraphPlan(NamedTuple):
    """What graphs of one structure share, independent of their constants.

    Attributes:
      codes: int32 [nodes, `CellLayout.first_word`], what each column of a node's row is: `ZEROS`,
        `TRASH` for an unused output, `WORDS` for a small constant, and from `FIRST_SLOT` on the
        graph's own slots, pool after pool, and then kept values.
      types: int32 [nodes].
      num_slots: of each pool, its own slots; see `plan_slots`.
    """

    graph: CellGraph
    codes: np.ndarray
    types: np.ndarray
    num_slots: tuple[int, ...]
    loops: tuple[int, ...]
    returned: Returned


class FlatGraph(NamedTuple):
    """A graph as arrays: its plan, and its constants.

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
        return len(self.plan.types)

    def pool_of(self, value: int, layout: CellLayout) -> int:
        node, output = divmod(value, layout.stride)
        return layout.types[self.graph.types[node]].output_pools[output]


def flatten(
    graph: Graph,
    layout: CellLayout,
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
    if key is not None:
        plan = layout.plans.get(key)
        if plan is None:
            planned = _plan_of_a_tree if isinstance(node.block, Tree) else _plan_of_a_chain
            plan = planned(graph, layout, key)
        if plan is not None:
            t = layout.types[layout.index_of[node.cell.key]]
            return FlatGraph(plan, _words(graph, layout, (t,)), (), {}, (), graph.then)
    return _Flattener(graph, layout, kept or {}).flat_graph()


def _form_of(graph: Graph) -> Hashable | None:
    """Return the key of the plan of a graph that is one tree or chain with a form; else None."""
    node = graph.nodes[0]
    block = node.block
    if block is None or len(graph.nodes) > 1 or graph.keep:
        return None
    if isinstance(block, Chain) and not block.form.is_shared:
        return None
    structure = block.shape.key if isinstance(block, Tree) else block.num_nodes
    found: list[Hashable] = [block.form, structure]
    for name, result in graph.outputs.items():
        if type(result) is not Output or result.node is not node:
            return None
        found += (name, result.index)
    return tuple(found)


def _words(graph: Graph, layout: CellLayout, types: Sequence[TypeLayout]) -> np.ndarray:
    """Return the small constants of a graph's nodes, which are of these types."""
    found = np.zeros((graph.num_nodes, layout.max_words), np.int32)
    end = 0
    for t, node in zip(types, graph.nodes, strict=True):
        begin, end, block = end, end + node.num_nodes, node.block
        rows, each, inputs = slice(begin, end), (), node.inputs
        if isinstance(block, Tree):
            t = layout.types[layout.index_of[block.form.leaf.key]]
            rows, each, inputs = slice(begin, begin + block.num_leaves), block.each, block.each
        elif block is not None:
            each = block.each
        for number, words in enumerate(t.words):
            if words is None:
                continue
            columns, value = slice(words.start, words.stop), inputs[number]
            if each and (values := each[number]) is not None:
                found[rows, columns] = words_of_each(values)
            elif type(value) is int:
                found[rows, columns] = value
            elif type(value) is not Output and value is not t.zeros[number]:
                found[rows, columns] = words_of_each(np.asarray(value)[None])[0]
    return found


@final
class _Flattener:
    """Makes a graph flat, node by node; `known` values of the previous graph were kept."""

    def __init__(self, graph: Graph, layout: CellLayout, kept: Mapping[tuple[Node, int], int]):
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
        # Of the plan, for each row.
        self._row_types: list[int] = []
        self._max_steps: list[int] = []
        self._predecessors: list[tuple[int, ...]] = []
        # The value of each input; -1 - i for entry i of `_others`.
        self._sources: list[list[int]] = []
        # A code, a large constant with its pool, or -1 for the next kept value.
        self._others: list[int | tuple[int, np.ndarray]] = [ZEROS, WORDS]
        self._constants: dict[tuple[int, bytes], int] = {}  # sources by pool and content
        self._kept: dict[int, int] = {}  # sources by the previous graph's value

    def flat_graph(self) -> FlatGraph:
        graph, layout = self._graph, self._layout
        keep = {(one.node, one.index): self._value(one) for one in graph.keep}
        structure, kept = self._structure(tuple(keep.values()))
        plan = None if structure is None else layout.plans.get(structure)
        words = _words(graph, layout, self._types)
        if plan is not None:
            return FlatGraph(plan, words, (), keep, kept, graph.then)
        for t, node in zip(self._types, graph.nodes, strict=True):
            self._add(t, node)
        plan, constants = self._plan(self._wanted(), list(keep.values()))
        if structure is not None:
            layout.plans.add(structure, plan, len(plan.types))
        return FlatGraph(plan, words, constants, keep, tuple(self._kept), graph.then)

    def _type_of(self, node: Node) -> TypeLayout:
        layout = self._layout
        index = layout.index_of.get(node.cell.key)
        is_known = index is not None
        if isinstance(node.block, Tree):
            is_known = is_known and node.block.form.leaf.key in layout.index_of
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

    def _structure(self, keep: tuple[int, ...]) -> tuple[Hashable | None, tuple[int, ...]]:
        """Return the key of the plan, and the values of the previous graph that it takes.

        The key is None for graphs with trees or large constants.
        """
        found: list[Hashable] = [keep]
        kept: dict[int, int] = {}  # value -> its place
        for name, result in self._graph.outputs.items():
            values = tuple([self._value(one) for one in parts_of(result)])
            found += (name, type(result), values)
        for t, node in zip(self._types, self._graph.nodes, strict=True):
            block = node.block
            if isinstance(block, Tree):
                return None, ()
            found += (t.index, node.max_steps, node.num_nodes)
            if block is not None:
                found.append(block.form.carry)
                for each, words in zip(block.each, t.words, strict=True):
                    if each is not None and words is None:
                        return None, ()
            for number, value in enumerate(node.inputs):
                if type(value) is Output:
                    row = self._row_of.get(value.node)
                    if row is None:
                        found.append(kept.setdefault(self._known_value(node, value), len(kept)))
                    else:
                        found.append((row, value.index))
                elif t.words[number] is not None or value is t.zeros[number]:
                    found.append(None)
                else:
                    return None, ()
        return tuple(found), tuple(kept)

    def _add(self, t: TypeLayout, node: Node) -> None:
        block = node.block
        if isinstance(block, Tree):
            self._add_tree(t, block)
            return
        sources: list[int] = []
        for number, value in enumerate(node.inputs):
            if type(value) is Output:
                sources.append(self._source_of(node, value))
            else:
                sources.append(self._constant(t, number, np.asarray(value)))
        self._append(t, sources, node.max_steps)
        if block is not None:
            self._extend(t, block, sources)

    def _plan(
        self, wanted: WantedValues, keep: Sequence[int]
    ) -> tuple[GraphPlan, tuple[LargeConstant, ...]]:
        """Return the plan and the large constants of the nodes; the next graph may take `keep`."""
        layout, stride, num_nodes = self._layout, self._layout.stride, len(self._row_types)
        graph = CellGraph(
            tuple(self._row_types),
            tuple(self._predecessors),
            tuple(self._max_steps),
            layout.loop_types,
        )
        uses = [0] * (num_nodes * stride)
        for taken in self._sources:
            for value in taken:
                if value >= 0:
                    uses[value] += 1
        for value in (*[value for value, _ in wanted], *keep):
            uses[value] += 1
        loops = [node for node, type in enumerate(self._row_types) if type in layout.loop_types]
        for node in loops:
            for output in layout.types[self._row_types[node]].carry:
                if output >= 0:
                    uses[node * stride + output] += 1
        slots, flags, num_slots = plan_slots(layout, graph, self._sources, uses)
        given: list[tuple[int, int, np.ndarray]] = []  # pool, slot, array
        for other in self._others:
            if isinstance(other, tuple):
                pool, array = other
                given.append((pool, num_slots[pool], array))
                num_slots[pool] += 1
        bases = list(accumulate(num_slots, initial=FIRST_SLOT))
        constants = tuple((pool, bases[pool] + slot, array) for pool, slot, array in given)
        return GraphPlan(
            graph=graph,
            codes=self._codes(slots, flags, bases, constants),
            types=np.array(self._row_types, np.int32),
            num_slots=tuple(num_slots),
            loops=tuple(loops),
            returned=Returned(wanted, stride, loops),
        ), constants

    def _codes(
        self,
        slots: Sequence[int],
        flags: Sequence[int],
        bases: Sequence[int],
        constants: Sequence[LargeConstant],
    ) -> np.ndarray:
        layout, num_nodes = self._layout, len(self._row_types)
        pools = layout.output_pools[self._row_types]
        of_values = np.reshape(slots, (num_nodes, layout.stride))
        of_values = np.where(of_values >= 0, of_values + np.array(bases)[pools], TRASH)
        left, kept = iter(constants), iter(range(bases[-1], bases[-1] + len(self._kept)))
        others = [
            next(left)[1] if isinstance(other, tuple) else next(kept) if other < 0 else other
            for other in self._others
        ]
        lookup = np.concatenate([others[::-1], of_values.ravel()])
        codes = np.full((num_nodes, layout.first_word), TRASH, np.int32)
        codes[:, : layout.max_inputs] = lookup[np.array(self._sources) + len(others)]
        codes[:, layout.first_output : layout.flag] = of_values
        if layout.done_pool is not None:
            of_flags = np.array(flags)
            codes[:, layout.flag] = np.where(
                of_flags >= 0, of_flags + bases[layout.done_pool], TRASH
            )
        return codes

    def _append(self, t: TypeLayout, sources: list[int], max_steps: int = 1) -> None:
        stride = self._layout.stride
        self._row_types.append(t.index)
        self._max_steps.append(max_steps)
        self._predecessors.append(
            tuple(dict.fromkeys([value // stride for value in sources if value >= 0]))
        )
        self._sources.append(sources + [_FROM_ZEROS] * (self._layout.max_inputs - len(sources)))

    def _extend(self, t: TypeLayout, chain: Chain, first: list[int]) -> None:
        stride = self._layout.stride
        for number in range(1, chain.num_nodes):
            before = (len(self._row_types) - 1) * stride
            sources = list(first)
            for column, (output, each) in enumerate(zip(chain.form.carry, chain.each, strict=True)):
                if output >= 0:
                    sources[column] = before + output
                elif each is not None:
                    sources[column] = self._constant(t, column, each[number])
            self._append(t, sources)

    def _add_tree(self, t: TypeLayout, tree: Tree) -> None:
        first, stride = len(self._row_types), self._layout.stride
        leaf = self._layout.types[self._layout.index_of[tree.form.leaf.key]]
        for number in range(tree.num_leaves):
            self._append(
                leaf, [self._constant(leaf, i, each[number]) for i, each in enumerate(tree.each)]
            )
        for pair in tree.shape.pairs.tolist():
            sources = []
            for side, output in zip(tree.form.sides, tree.form.outputs, strict=True):
                cell = tree.form.leaf if pair[side] < tree.num_leaves else t.cell
                sources.append((first + pair[side]) * stride + cell.output_index[output])
            self._append(t, sources)

    def _source_of(self, node: Node, value: Output) -> int:
        row = self._row_of.get(value.node)
        if row is not None:
            return row * self._layout.stride + value.index
        known = self._known_value(node, value)
        found = self._kept.get(known)
        if found is None:
            found = self._kept[known] = self._other(-1)
        return found

    def _known_value(self, node: Node, value: Output) -> int:
        """Return a value of the previous graph; raises InvalidGraphError if it was not kept."""
        known = self._known.get((value.node, value.index))
        if known is None:
            raise InvalidGraphError(
                f"{node} takes {value}, of another graph; list it in that graph's keep, and take "
                "it in the graph that its `then` returns"
            )
        return known

    def _constant(self, t: TypeLayout, number: int, value: np.ndarray) -> int:
        """Return the source of a constant of a type's input; equal large ones share a slot."""
        if t.words[number] is not None:
            return _FROM_WORDS
        if not value.any():
            return _FROM_ZEROS
        key = t.input_pools[number], value.tobytes()
        found = self._constants.get(key)
        if found is None:
            found = self._constants[key] = self._other((t.input_pools[number], value))
        return found

    def _other(self, entry: int | tuple[int, np.ndarray]) -> int:
        self._others.append(entry)
        return -len(self._others)


# Slots that are free when a node runs, by pool.
_Spare: TypeAlias = "dict[int, list[int]]"


def plan_slots(
    layout: CellLayout, graph: CellGraph, sources: Sequence[Sequence[int]], uses: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Return a slot for every value that is taken, valid for any order in which nodes may run.

    A node's outputs take the slots of the inputs that no other node takes, in their order; so the
    states of a chain stay in place, and an inner node of a tree takes the slots of its left child.
    Slots that it does not use go to one node that follows it. For chains and trees these are the
    fewest slots with which every order runs. Values that several nodes or a loop take keep their
    slots until the graph is removed.

    Args:
      sources: for each node the value of each input; negative for constants.
      uses: how often each value is taken or returned.

    Returns:
      The slot of each value in its pool, -1 for unused values; the slot of each node's flag, -1 for
        nodes that are no loops; and the number of slots of each pool.
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


def _plan_of_a_chain(graph: Graph, layout: CellLayout, key: Hashable) -> GraphPlan | None:
    """Return the plan of one chain, in which each carried output stays in one slot.

    None if its cell is unknown, or it has large constants.
    """
    node = graph.nodes[0]
    chain, index = node.block, layout.index_of.get(node.cell.key)
    assert isinstance(chain, Chain)
    if index is None:
        return None
    t, num = layout.types[index], chain.num_nodes
    for words, value, zeros in zip(t.words, node.inputs, t.zeros, strict=True):
        if words is None and value is not zeros:
            return None
    found = [
        (name, output.index) for name, output in graph.outputs.items() if type(output) is Output
    ]
    returned = sorted({output for _, output in found})
    carried = [(i, output) for i, output in enumerate(chain.form.carry) if output >= 0 and num > 1]
    used = sorted({*returned, *[output for _, output in carried]})
    num_slots, code_of = _slots(layout, t, dict.fromkeys(used, 1))
    codes = np.full((num, layout.first_word), TRASH, np.int32)
    codes[:, : layout.max_inputs] = ZEROS
    codes[:, : t.num_inputs] = [ZEROS if words is None else WORDS for words in t.words]
    for number, output in carried:
        codes[1:, number] = codes[:-1, layout.first_output + output] = code_of[output]
    for output in returned:
        codes[-1, layout.first_output + output] = code_of[output]
    last = (num - 1) * layout.stride
    wanted = tuple([(last + output, Wanted(name)) for name, output in found])
    plan = GraphPlan(
        graph=chain_graph(t.index, num),
        codes=codes,
        types=np.full(num, t.index, np.int32),
        num_slots=num_slots,
        loops=(),
        returned=Returned(wanted, layout.stride, ()),
    )
    return layout.plans.add(key, plan, num)


def _plan_of_a_tree(graph: Graph, layout: CellLayout, key: Hashable) -> GraphPlan | None:
    """Return the plan of one tree; None if its cells are unknown or equal, or constants large."""
    root = graph.nodes[0]
    tree = root.block
    assert isinstance(tree, Tree)
    leaf, pair = layout.index_of.get(tree.form.leaf.key), layout.index_of.get(root.cell.key)
    if leaf is None or pair is None or leaf == pair or None in layout.types[leaf].words:
        return None
    outputs = tuple(
        [(name, one.index) for name, one in graph.outputs.items() if type(one) is Output]
    )
    same = tree.form, tree.num_leaves, outputs
    trees = layout.plans.get(same) or layout.plans.add(
        same, _TreesOfASize(layout, layout.types[leaf], layout.types[pair], tree, outputs), 1
    )
    return layout.plans.add(key, trees.plan(tree.shape), tree.num_nodes)


@final
class _TreesOfASize:
    """The shared plan of graphs that are one tree each, of one form and number of leaves.

    Leaves have small constants only. As in `plan_slots`, outputs of a pair take its left node's
    slots. `outputs` are the name and number of each output of the root that graphs return.
    """

    def __init__(
        self,
        layout: CellLayout,
        leaf: TypeLayout,
        pair: TypeLayout,
        tree: Tree,
        outputs: Sequence[tuple[str, int]],
    ):
        num, first = tree.num_leaves, layout.first_output
        self._leaf, self._pair = leaf.index, pair.index
        self._sides = np.array(tree.form.sides)
        root = (tree.num_nodes - 1) * layout.stride
        wanted = tuple([(root + output, Wanted(name)) for name, output in outputs])
        self._returned = Returned(wanted, layout.stride, ())
        inputs = [pair.cell.output_index[name] for name in tree.form.outputs]
        # Each output that pairs take has one slot for each leaf; any other returned output has one.
        sizes = dict.fromkeys(inputs, num)
        for _, output in outputs:
            sizes.setdefault(output, 1)
        self._num_slots, code_of = _slots(layout, pair, sizes)
        # The codes that do not depend on the pairs, and the addends of those that do.
        self._codes = np.full((tree.num_nodes, layout.first_word), TRASH, np.int32)
        self._codes[:num, : leaf.num_inputs] = WORDS
        self._of_inputs = np.array([code_of[output] for output in inputs], np.int32)
        leaves = np.arange(num)
        for output in dict.fromkeys(inputs):
            of_leaf = first + tree.form.leaf.output_index[list(pair.cell.outputs)[output]]
            self._codes[:num, of_leaf] = leaves + code_of[output]
        taken = sorted({*inputs})
        self._columns = np.array([first + output for output in taken])
        self._of_outputs = np.array([code_of[output] for output in taken], np.int32)
        for output in sizes:
            if output not in inputs:
                self._codes[-1, first + output] = code_of[output]
        self._types = np.full(tree.num_nodes, pair.index, np.int32)
        self._types[:num] = leaf.index

    def plan(self, shape: TreeShape) -> GraphPlan:
        pairs, slot = shape.pairs, shape.leftmost  # each node takes the slots of this leaf
        num = len(pairs) + 1
        codes = self._codes.copy()
        codes[num:, : len(self._sides)] = slot[pairs[:, self._sides]] + self._of_inputs
        codes[num:, self._columns] = slot[num:, None] + self._of_outputs
        return GraphPlan(
            graph=tree_graph(self._leaf, self._pair, shape),
            codes=codes,
            types=self._types,
            num_slots=self._num_slots,
            loops=(),
            returned=self._returned,
        )


def _slots(
    layout: CellLayout, t: TypeLayout, sizes: Mapping[int, int]
) -> tuple[tuple[int, ...], dict[int, int]]:
    """Return the slots of each pool and the code of each output's first slot, by their sizes."""
    num_slots = [0] * len(layout.pools)
    places: dict[int, tuple[int, int]] = {}
    for output, size in sizes.items():
        pool = t.output_pools[output]
        places[output] = pool, num_slots[pool]
        num_slots[pool] += size
    bases = list(accumulate(num_slots, initial=FIRST_SLOT))
    return tuple(num_slots), {
        output: bases[pool] + begin for output, (pool, begin) in places.items()
    }
