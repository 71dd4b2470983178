"""The structure of a graph as arrays: its nodes, and the slots that they read and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias, final

import numpy as np

from jaxserve.cells.cell_graph import CellGraph, cell_graph, chain_graph, tree_graph
from jaxserve.cells.layout import Layout, TypeLayout
from jaxserve.cells.nodes import Chain, Node, Output, Tree
from jaxserve.cells.tree_shape import TreeShape
from jaxserve.core.errors import InvalidGraphError

# Slots that are free when a node runs, by pool.
_Spare: TypeAlias = "dict[int, list[int]]"


def plan_slots(
    layout: Layout, graph: CellGraph, sources: Sequence[Sequence[int]], uses: Sequence[int]
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


# Codes of inputs and outputs without a slot of the graph, and the first code with one.
ZEROS, TRASH, WORDS, FIRST_SLOT = 0, 1, 2, 3


@final
@dataclass(frozen=True)
class Wanted:
    """A value that a graph returns under `name`, or with `is_steps` the values of all steps.

    `member` is its number in a list of values; None for a single value.
    """

    name: str
    member: int | None = None
    is_steps: bool = False


# Sources of inputs: the first two entries of `PlanBuilder._others`.
_FROM_ZEROS, _FROM_WORDS = -1, -2
# (value, what it is for); a value is `node * Layout.stride + output`.
WantedValues: TypeAlias = "tuple[tuple[int, Wanted], ...]"
# A large constant: its pool, its code, and its array.
LargeConstant: TypeAlias = "tuple[int, int, np.ndarray]"


@final
class Returned:
    """The values that graphs return, in the forms that parts and executors need.

    Attributes:
      num_members: the lengths of lists, by name.
      steps: the names of the outputs that have the values of all steps.
      num_values: the number of `wanted` that are not steps.
      reads: (node, value) of each value to read when its node has run; without loops.
    """

    __slots__ = ("wanted", "wanted_for", "num_members", "steps", "num_values", "reads")

    def __init__(self, wanted: WantedValues, stride: int, loops: Sequence[int]):
        self.wanted = wanted
        self.wanted_for: dict[int, list[Wanted]] = {}
        self.num_members: dict[str, int] = {}
        for value, one in wanted:
            self.wanted_for.setdefault(value, []).append(one)
            if one.member is not None:
                self.num_members[one.name] = self.num_members.get(one.name, 0) + 1
        self.steps = tuple([one.name for _, one in wanted if one.is_steps])
        self.num_values = len(wanted) - len(self.steps)
        values = dict.fromkeys([value for value, one in wanted if not one.is_steps])
        pairs = [(value // stride, value) for value in values]
        self.reads = tuple([pair for pair in pairs if pair[0] not in loops])


class GraphPlan(NamedTuple):
    """What graphs of one structure share, independent of their constants.

    Attributes:
      codes: int32 [nodes, `Layout.first_word`], what each column of a node's row is: `ZEROS`,
        `TRASH` for an unused output, `WORDS` for a small constant, and from `FIRST_SLOT` on the
        graph's own slots, pool after pool, and then kept values.
      num_slots: of each pool, its own slots; see `plan_slots`.
    """

    graph: CellGraph
    num_nodes: int
    codes: np.ndarray
    types: np.ndarray
    num_slots: tuple[int, ...]
    loops: tuple[int, ...]
    returned: Returned


@final
class PlanBuilder:
    """Builds the plan of a graph, node by node; `known` values of the previous graph were kept."""

    def __init__(
        self, layout: Layout, row_of: Mapping[Node, int], known: Mapping[tuple[Node, int], int]
    ):
        self._layout = layout
        self._row_of = row_of
        self._known = known
        self._types: list[int] = []
        self._max_steps: list[int] = []
        self._predecessors: list[tuple[int, ...]] = []
        # The value of each input; -1 - i for entry i of `_others`.
        self._sources: list[list[int]] = []
        # A code, a large constant with its pool, or -1 for the next kept value.
        self._others: list[int | tuple[int, np.ndarray]] = [ZEROS, WORDS]
        self._constants: dict[tuple[int, bytes], int] = {}  # sources by pool and content
        self._kept: dict[int, int] = {}  # sources by the previous graph's value

    @property
    def kept(self) -> tuple[int, ...]:
        """The kept values that its nodes take, in the previous graph's numbering."""
        return tuple(self._kept)

    def add(self, t: TypeLayout, node: Node) -> None:
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

    def plan(
        self, wanted: WantedValues, keep: Sequence[int]
    ) -> tuple[GraphPlan, tuple[LargeConstant, ...]]:
        """Return the plan and the large constants of the nodes; the next graph may take `keep`."""
        layout, stride, num_nodes = self._layout, self._layout.stride, len(self._types)
        graph = cell_graph(
            tuple(self._types),
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
        loops = [node for node, type in enumerate(self._types) if type in layout.loop_types]
        for node in loops:
            for output in layout.types[self._types[node]].carry:
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
            num_nodes=num_nodes,
            codes=self._codes(slots, flags, bases, constants),
            types=np.array(self._types, np.int32),
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
        layout, num_nodes = self._layout, len(self._types)
        pools = layout.output_pools[self._types]
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
        self._types.append(t.index)
        self._max_steps.append(max_steps)
        self._predecessors.append(
            tuple(dict.fromkeys([value // stride for value in sources if value >= 0]))
        )
        self._sources.append(sources + [_FROM_ZEROS] * (self._layout.max_inputs - len(sources)))

    def _extend(self, t: TypeLayout, chain: Chain, first: list[int]) -> None:
        stride = self._layout.stride
        for number in range(1, chain.num_nodes):
            before = (len(self._types) - 1) * stride
            sources = list(first)
            for column, (output, each) in enumerate(zip(chain.carry, chain.each, strict=True)):
                if output >= 0:
                    sources[column] = before + output
                elif each is not None:
                    sources[column] = self._constant(t, column, each[number])
            self._append(t, sources)

    def _add_tree(self, t: TypeLayout, tree: Tree) -> None:
        first, stride = len(self._types), self._layout.stride
        leaf = self._layout.types[self._layout.index_of[tree.leaf.key]]
        for number in range(tree.num_leaves):
            self._append(
                leaf,
                [self._constant(leaf, i, each[number]) for i, each in enumerate(tree.each)],
            )
        for pair in tree.pairs.tolist():
            sources = []
            for side, output in zip(tree.sides, tree.outputs, strict=True):
                cell = tree.leaf if pair[side] < tree.num_leaves else t.cell
                sources.append((first + pair[side]) * stride + cell.output_index[output])
            self._append(t, sources)

    def _source_of(self, node: Node, value: Output) -> int:
        row = self._row_of.get(value.node)
        if row is not None:
            return row * self._layout.stride + value.index
        known = self._known.get((value.node, value.index))
        if known is None:
            raise InvalidGraphError(
                f"{node} takes {value}, of another graph; list it in that graph's keep, and take "
                "it in the graph that its `then` returns"
            )
        found = self._kept.get(known)
        if found is None:
            found = self._kept[known] = self._other(-1)
        return found

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


def plan_of_a_chain(layout: Layout, t: TypeLayout, chain: Chain, wanted: WantedValues) -> GraphPlan:
    """Return the plan of one chain with small constants; each carried output stays in one slot."""
    num = chain.num_nodes
    returned = tuple(sorted({value - (num - 1) * layout.stride for value, _ in wanted}))
    # For all lengths: the codes of the first node, of the inner nodes, and of the last one.
    key = "chain", t.index, chain.carry, returned, min(num, 2)
    ends = layout.plans.get(key) or layout.plans.add(
        key, _ends_of_a_chain(layout, t, chain, returned), 3
    )
    num_slots, (of_first, within, of_last) = ends
    codes = np.empty((num, layout.first_word), np.int32)
    codes[:] = within
    codes[0], codes[-1] = of_first, of_last
    return GraphPlan(
        graph=chain_graph(t.index, num),
        num_nodes=num,
        codes=codes,
        types=np.full(num, t.index, np.int32),
        num_slots=num_slots,
        loops=(),
        returned=Returned(wanted, layout.stride, ()),
    )


def _ends_of_a_chain(
    layout: Layout, t: TypeLayout, chain: Chain, returned: Sequence[int]
) -> tuple[tuple[int, ...], np.ndarray]:
    """Return the slots of each pool, and the codes of a chain's first, inner and last nodes."""
    carry = chain.carry if chain.num_nodes > 1 else ()
    carried = [output for output in carry if output >= 0]
    num_slots, code_of = _slots(layout, t, dict.fromkeys(sorted({*carried, *returned}), 1))
    codes = np.full((3, layout.first_word), TRASH, np.int32)
    codes[:, : layout.max_inputs] = ZEROS
    codes[:, : t.num_inputs] = [ZEROS if words is None else WORDS for words in t.words]
    for number, output in enumerate(carry):
        if output >= 0:
            codes[1:, number] = code_of[output]
            codes[:-1, layout.first_output + output] = code_of[output]
    for output in returned:
        codes[-1, layout.first_output + output] = code_of[output]
    return num_slots, codes


@final
class TreesOfASize:
    """The shared plan of graphs that are one tree each, of one form and number of leaves.

    Leaves have small constants only. As in `plan_slots`, outputs of a pair take its left node's
    slots. `outputs` are the name and number of each output of the root that graphs return.
    """

    def __init__(
        self,
        layout: Layout,
        leaf: TypeLayout,
        pair: TypeLayout,
        tree: Tree,
        outputs: Sequence[tuple[str, int]],
    ):
        num, first = tree.num_leaves, layout.first_output
        self._leaf, self._pair = leaf.index, pair.index
        self._sides = np.array(tree.sides)
        root = (tree.num_nodes - 1) * layout.stride
        wanted = tuple([(root + output, Wanted(name)) for name, output in outputs])
        self._returned = Returned(wanted, layout.stride, ())
        inputs = [pair.cell.output_index[name] for name in tree.outputs]
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
            of_leaf = first + tree.leaf.output_index[list(pair.cell.outputs)[output]]
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
            num_nodes=len(slot),
            codes=codes,
            types=self._types,
            num_slots=self._num_slots,
            loops=(),
            returned=self._returned,
        )


def _slots(
    layout: Layout, t: TypeLayout, sizes: Mapping[int, int]
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
