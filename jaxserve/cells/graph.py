"""Graphs of cells, as the user's function returns them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from jaxserve.cells.tree_shape import TreeShape
from jaxserve.cells.values import Constant, ValueSpec
from jaxserve.core.errors import (
    CyclicGraphError,
    EmptyGraphError,
    InputMismatchError,
    InvalidGraphError,
    MissingInputError,
    TooManyNodesError,
    UnknownInputError,
)

# The values of a graph's outputs, by name.
Values: TypeAlias = "dict[str, np.ndarray]"
# Decides on the host what follows a graph: another graph, or the request's values.
Then: TypeAlias = "Callable[[Values], Graph | Values]"
# The most nodes of a graph, unless a runtime is created with another limit.
MAX_NODES = 100_000
# The most nodes of a cycle that its error names.
_MAX_NAMED = 8


@final
@dataclass(eq=False, slots=True)
class ChainForm:
    """What chains have in common that differ only in their lengths and in their nodes' constants.

    Attributes:
      inputs: the first node's, in the cell's order, with None for constants.
      carry: for each input, the output of the previous node that it takes; -1 for none.
      is_shared: whether other chains have the same object.
    """

    inputs: Sequence[Any]
    carry: tuple[int, ...]
    is_shared: bool


class Chain(NamedTuple):
    """The nodes of `BaseCell.chain`.

    `each` has for each input the constants of the nodes [num_nodes, ...]; None for other inputs.
    """

    num_nodes: int
    each: tuple[np.ndarray | None, ...]
    form: ChainForm


@final
@dataclass(eq=False, slots=True)
class TreeForm:
    """What trees share that differ only in their pairs and in the constants of their leaves.

    Attributes:
      leaf: the `BaseCell` of the leaves.
      sides: for each input of a pair: 0 if it is of the left node, 1 of the right one.
      outputs: for each input of a pair: the name of the output that it takes.
    """

    leaf: Any
    sides: tuple[int, ...]
    outputs: tuple[str, ...]


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
    def num_leaves(self) -> int:
        return len(self.shape.pairs) + 1

    @property
    def num_nodes(self) -> int:
        return 2 * len(self.shape.pairs) + 1


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

    def __getitem__(self, name: str) -> Output:
        index = self.cell.output_index.get(name)
        if index is None:
            raise UnknownInputError(
                f"{self} has no output {name!r}; its outputs are "
                f"{', '.join(map(repr, self.cell.outputs))}"
            )
        return Output(self, index, self.cell.outputs[name])

    def __iter__(self) -> Iterator[str]:
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
@dataclass(eq=False, repr=False, slots=True)
class Output:
    """One output of a node, which other nodes may take as an input."""

    node: Node
    index: int
    spec: ValueSpec

    def __str__(self) -> str:
        names = list(self.node.cell.outputs)
        return f"output {names[self.index]!r} of {self.node}"


@final
@dataclass(eq=False, repr=False, slots=True)
class Steps:
    """The values of an output in all steps of a loop; only a graph's outputs may contain it."""

    output: Output


# What a graph may return under a name; a list returns its values stacked.
Result: TypeAlias = "Output | Steps | Sequence[Output]"


@final
class Graph:
    """The nodes that outputs depend on. A node belongs to the first graph that contains it.

    Args:
      outputs: the values that the request returns, by name: an output of a node, a list of outputs
        of the same shape (returned stacked), or the steps of a loop.
      then: function on the host that gets the outputs' values and returns the next graph, or the
        request's values. It must not block: it runs on the runtime's thread. By default the outputs
        are the request's values.
      keep: outputs that stay on the device, so that the graph that `then` returns may take them as
        inputs.
      max_nodes: the most nodes; a runtime may accept fewer.

    Attributes:
      nodes: every node, after all nodes that it depends on; a chain is one `Node` here.
      num_nodes: the number of nodes, with those of chains.

    Raises:
      EmptyGraphError: no output depends on a node.
      CyclicGraphError: a node depends on itself, which only `from_edges` can make.
      TooManyNodesError: there are over `max_nodes` nodes.
      InvalidGraphError: an output is none of the allowed kinds.
    """

    def __init__(
        self,
        outputs: Mapping[str, Result],
        *,
        then: Then | None = None,
        keep: Iterable[Output] = (),
        max_nodes: int = MAX_NODES,
    ):
        self.outputs = {name: _checked(name, result) for name, result in outputs.items()}
        self.then = then
        self.keep = tuple(keep)
        if not self.outputs:
            raise EmptyGraphError("the graph has no outputs; pass at least one output of a node")
        roots = [out.node for result in self.outputs.values() for out in parts_of(result)]
        roots += [output.node for output in self.keep]
        self.nodes = _sorted([node for node in roots if not node.is_placed])
        self.num_nodes = sum([node.num_nodes for node in self.nodes])
        if self.num_nodes > max_nodes:
            raise TooManyNodesError(_too_many(f"{self.num_nodes}", max_nodes))
        if not self.nodes:
            raise EmptyGraphError(
                "the graph has no nodes that an earlier graph does not have; call a cell"
            )
        for node in self.nodes:
            node.is_placed = True

    @classmethod
    def from_edges(
        cls,
        cells: Sequence[Any],
        inputs: Sequence[Mapping[str, Any]],
        outputs: Mapping[str, tuple[int, str]],
        *,
        max_nodes: int = MAX_NODES,
    ) -> Graph:
        """Return the graph of a list of nodes, as read from a file.

        Args:
          cells: the `BaseCell` of each node.
          inputs: the inputs of each node: a constant, or (index of a node, name of its output).
          outputs: (index of a node, name of its output).

        Raises:
          CyclicGraphError: nodes depend on each other.
          InvalidGraphError: a tuple is not (index of a node, name of its output), or the numbers of
            inputs and cells differ; or a subclass, as in a cell's call.
        """
        if len(cells) != len(inputs):
            raise InvalidGraphError(
                f"{len(cells)} cells and the inputs of {len(inputs)} nodes were given; pass as many"
            )
        if len(cells) > max_nodes:
            raise TooManyNodesError(_too_many(f"{len(cells)}", max_nodes))
        nodes: list[Node | None] = [None] * len(cells)
        for index in _order(cells, inputs):
            given = {name: _resolved(value, nodes) for name, value in inputs[index].items()}
            try:
                nodes[index] = cells[index](**given)
            except (MissingInputError, UnknownInputError, InputMismatchError) as error:
                raise type(error)(f"node {index}: {error}") from error
        for name, value in outputs.items():
            _check_reference(f"output {name!r}", value, len(nodes))
        found = {name: _resolved(value, nodes) for name, value in outputs.items()}
        return cls(found, max_nodes=max_nodes)


def parts_of(result: Result) -> Sequence[Output]:
    if isinstance(result, Output):
        return (result,)
    return (result.output,) if isinstance(result, Steps) else result


def _checked(name: str, result: Any) -> Result:
    if isinstance(result, Output | Steps):
        return result
    if not isinstance(result, list | tuple) or not result:
        raise InvalidGraphError(
            f"output {name!r} of the graph is a {type(result).__name__}; pass an output of a node, "
            'such as node["h"], a list of them that is not empty, or node.steps("token")'
        )
    specs: set[ValueSpec] = set()
    for one in result:
        if not isinstance(one, Output):
            raise InvalidGraphError(
                f"output {name!r} of the graph is a list with a {type(one).__name__}; pass outputs "
                'of nodes, such as node["h"]'
            )
        specs.add(one.spec)
    if len(specs) > 1:
        raise InputMismatchError(
            f"output {name!r} of the graph is a list of {', '.join(map(str, specs))}; pass outputs "
            "of one shape and dtype"
        )
    return tuple(result)


def _sorted(roots: Sequence[Node]) -> tuple[Node, ...]:
    done: dict[Node, None] = {}
    stack: list[Node] = list(reversed(roots))
    while stack:
        node = stack[-1]
        if node in done:
            stack.pop()
            continue
        num_before = len(stack)
        for value in node.inputs:
            if type(value) is Output:
                other = value.node
                if other not in done and not other.is_placed:
                    stack.append(other)
        if len(stack) == num_before:
            done[node] = None
            stack.pop()
    return tuple(done)


def _too_many(given: str, max_nodes: int) -> str:
    return (
        f"the graph has {given} nodes, and {max_nodes} are allowed; pass a shorter input, or a "
        "higher max_nodes"
    )


def _resolved(value: Any, nodes: Sequence[Node | None]) -> Any:
    if not isinstance(value, tuple):
        return value
    index, name = value
    node = nodes[index]
    assert node is not None
    return node[name]


def _check_reference(what: str, value: Any, num_nodes: int) -> None:
    match value:
        case int() | np.integer() as index, str():
            if not 0 <= index < num_nodes:
                raise InvalidGraphError(
                    f"{what} is of node {index}; the graph has the nodes 0 to {num_nodes - 1}"
                )
        case _:
            raise InvalidGraphError(
                f"{what} is {value!r}; pass (index of a node, name of its output)"
            )


def _order(cells: Sequence[Any], inputs: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the indices of nodes, dependencies first."""
    before: dict[int, list[int]] = {}
    for index, given in enumerate(inputs):
        taken = {name: value for name, value in given.items() if isinstance(value, tuple)}
        for name, value in taken.items():
            _check_reference(f"node {index}: input {name!r}", value, len(inputs))
        before[index] = [value[0] for value in taken.values()]
    try:
        return list(TopologicalSorter(before).static_order())
    except CycleError as error:
        cycle = error.args[1][:0:-1]  # each takes an output of the next one
    first = cycle.index(min(cycle))
    names = [
        f"node {index} (cell {cells[index].name!r})" for index in cycle[first:] + cycle[:first]
    ]
    few = names if len(names) <= _MAX_NAMED else [*names[:_MAX_NAMED], "others"]
    through = f" through {', '.join(few[1:])}" if few[1:] else ""
    raise CyclicGraphError(
        f"{few[0]} depends on itself{through}; remove one of the edges between them"
    )


def label_of(cell: Any, inputs: Iterable[Any]) -> str:
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
