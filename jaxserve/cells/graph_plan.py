"""The structure of a graph as arrays: its nodes, and the slots that they read and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias, final

import numpy as np

from jaxserve.cells.blocks import Chain, Tree
from jaxserve.cells.cell_graph import CellGraph, cell_graph
from jaxserve.cells.layout import Layout, TypeLayout
from jaxserve.cells.nodes import Node, Output
from jaxserve.cells.slot_plan import plan_slots
from jaxserve.core.errors import InvalidGraphError

# Codes of inputs and outputs that have no slot of the graph's own, and the first that has one.
ZEROS, TRASH, WORDS, FIRST_SLOT = 0, 1, 2, 3


@final
@dataclass(frozen=True)
class Wanted:
    """A value that a graph returns.

    Attributes:
      name: name of the graph's output.
      member: its number in a list of values; None for a single value.
      is_steps: whether the values of all steps are wanted, not the last one.
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
    """The values that graphs return, as their parts and executors ask for them.

    Attributes:
      wanted: for every value.
      wanted_for: the same by value.
      num_members: the lengths of lists, by name.
      steps: the names of the outputs that have the values of all steps.
      num_values: the number of `wanted` that are not steps.
      reads: (node, value) of each value to read when its node has run; not those of loops.

    Args:
      stride: of the values.
      loops: the nodes that are loops.
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
    """What graphs of one structure share, whatever constants they have.

    Attributes:
      codes: int32 [nodes, `Layout.first_word`], what each column of a node's row is: `ZEROS`,
        `TRASH` for an output that nothing takes, `WORDS` for a small constant, and from
        `FIRST_SLOT` on the graph's own slots, pool after pool, and then kept values.
      types: int32 [nodes], the types as an array.
      num_slots: of each pool, its own slots; see `plan_slots`.
      loops: the nodes that are loops.
      returned: the values that the graph returns.
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
    """Makes the plan of a graph, node by node.

    Args:
      row_of: the number of each node, or of the last one of its chain or tree.
      known: values of the graph before it that were kept.
    """

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
        self._kept: dict[int, int] = {}  # sources by the value of the graph before

    @property
    def kept(self) -> tuple[int, ...]:
        """The kept values that its nodes take, as the graph's before it."""
        return tuple(self._kept)

    def add(self, t: TypeLayout, node: Node) -> None:
        """Add a node, or those of a chain or a tree, after what they depend on."""
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
        """Return the plan of the nodes, and their large constants.

        Args:
          keep: values that the next graph may take.
        """
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
        """Return the codes of all columns; `bases` are those of the first slot of each pool."""
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
        """Add the nodes of a chain after its first."""
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
