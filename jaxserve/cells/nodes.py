"""The nodes that calling a cell makes, and their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from jaxserve.cells.tree_shape import TreeShape
from jaxserve.cells.values import Constant, ValueSpec
from jaxserve.core.errors import UnknownInputError


@final
class ChainForm:
    """What chains share that differ only in their lengths and in the constants of their nodes.

    `inputs` are the first node's, in the cell's order, with None for constants; `carry` is as in
    `Chain`.
    """

    __slots__ = ("inputs", "carry")

    def __init__(self, inputs: Sequence[Any], carry: tuple[int, ...]):
        self.inputs = inputs
        self.carry = carry


class Chain(NamedTuple):
    """The nodes of `BaseCell.chain`.

    Attributes:
      each: for each input, the constants of the nodes [num_nodes, ...]; None for other inputs.
      carry: for each input, the output of the previous node that it takes; -1 for none.
      form: shared by chains of one form; None without a form.
    """

    num_nodes: int
    each: tuple[np.ndarray | None, ...]
    carry: tuple[int, ...]
    form: ChainForm | None = None


@final
class TreeForm:
    """What trees share that differ only in their pairs and in the constants of their leaves.

    Attributes:
      leaf: the `BaseCell` of the leaves.
      sides: for each input of a pair: 0 if it is of the left node, 1 of the right one.
      outputs: for each input of a pair: the name of the output that it takes.
    """

    __slots__ = ("leaf", "sides", "outputs")

    def __init__(self, leaf: Any, sides: tuple[int, ...], outputs: tuple[str, ...]):
        self.leaf = leaf
        self.sides = sides
        self.outputs = outputs


class Tree(NamedTuple):
    """The nodes of `BaseCell.tree`, in the order of their numbers: leaves, and then pairs.

    Attributes:
      form: the same object for trees that share it.
      each: for each input of a leaf, the constants of the leaves [num_leaves, ...].
      shape: how its pairs join the nodes.
    """

    form: TreeForm
    each: tuple[np.ndarray, ...]
    shape: TreeShape

    @property
    def leaf(self) -> Any:
        return self.form.leaf

    @property
    def pairs(self) -> np.ndarray:
        return self.shape.pairs

    @property
    def sides(self) -> tuple[int, ...]:
        return self.form.sides

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.form.outputs

    @property
    def num_leaves(self) -> int:
        return len(self.pairs) + 1

    @property
    def num_nodes(self) -> int:
        return 2 * len(self.pairs) + 1


@final
class Node:
    """One call of a cell in a graph; `node["h"]` is its output `h`.

    For a loop, this is the value of the last step, and `steps("token")` has those of all steps.

    Attributes:
      cell: the `BaseCell`, whose module imports this one.
      inputs: outputs of other nodes and constants, in the order of the cell's inputs.
      max_steps: most times that the cell runs; 1 except for loops.
      block: the chain or tree that it stands for, or None. It is the last node of the chain, with
        the first one's `inputs`, or the root of the tree.
      num_nodes: how many nodes it stands for.
      is_placed: whether a graph has the node. Later graphs may take its outputs, and do not compute
        it again.
    """

    __slots__ = ("cell", "inputs", "max_steps", "block", "num_nodes", "is_placed")

    def __init__(
        self,
        cell: Any,
        inputs: tuple[Output | Constant, ...],
        max_steps: int = 1,
        block: Chain | Tree | None = None,
    ):
        self.cell = cell
        self.inputs = inputs
        self.max_steps = max_steps
        self.block = block
        self.num_nodes = 1 if block is None else block.num_nodes
        self.is_placed = False

    def place(self) -> None:
        self.is_placed = True

    def __getitem__(self, name: str) -> Output:
        index = self.cell.output_index.get(name)
        if index is None:
            raise UnknownInputError(
                f"{self} has no output {name!r}; its outputs are "
                f"{', '.join(map(repr, self.cell.outputs))}"
            )
        return Output(self, index, self.cell.outputs[name])

    def __iter__(self):
        return iter(self.cell.outputs)

    def steps(self, name: str) -> Steps:
        """Return an output's values of all steps, as an output of the graph.

        Raises:
          UnknownInputError: the node's cell is not a loop, or does not emit this output.
        """
        if name not in self.cell.emits:
            raise UnknownInputError(
                f"{self} does not emit {name!r}; it emits "
                f"{', '.join(map(repr, self.cell.emits)) or 'nothing'}, so add it to emits of its "
                "Repeat"
            )
        return Steps(self[name])

    def __str__(self) -> str:
        return label_of(self.cell, self.inputs)


@final
class Output:
    """One output of a node, which other nodes may take as an input."""

    __slots__ = ("node", "index", "spec")

    def __init__(self, node: Node, index: int, spec: ValueSpec):
        self.node = node
        self.index = index
        self.spec = spec

    def __str__(self) -> str:
        names = list(self.node.cell.outputs)
        return f"output {names[self.index]!r} of {self.node}"


@final
class Steps:
    """The values of an output in all steps of a loop; only a graph's outputs may contain it."""

    __slots__ = ("output",)

    def __init__(self, output: Output):
        self.output = output


# What a graph may return under a name; a list returns its values stacked.
Result: TypeAlias = "Output | Steps | Sequence[Output]"


def label_of(cell: Any, inputs: Any) -> str:
    """Return a node's name in errors: `lstm[3]` depends on three other nodes of the cell `lstm`."""
    seen: set[int] = set()
    stack = [value.node for value in inputs if isinstance(value, Output)]
    stack += [value for value in inputs if isinstance(value, Node)]
    number = 0
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen.add(id(node))
            number += node.num_nodes * (node.cell is cell)
            stack += [value.node for value in node.inputs if isinstance(value, Output)]
    return f"node {cell.name}[{number}] of cell {cell.name!r}"
