"""Graphs of cells, as the user's function returns them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np

from jaxserve.cells.base import BaseCell
from jaxserve.cells.nodes import Node, Output, Result, Steps
from jaxserve.cells.values import ValueSpec
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
            node.place()

    @classmethod
    def from_edges(
        cls,
        cells: Sequence[BaseCell],
        inputs: Sequence[Mapping[str, Any]],
        outputs: Mapping[str, tuple[int, str]],
        *,
        max_nodes: int = MAX_NODES,
    ) -> Graph:
        """Return the graph of a list of nodes, as read from a file.

        Args:
          cells: the cell of each node.
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


def _order(cells: Sequence[BaseCell], inputs: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the indices of nodes, dependencies first."""
    num_left = [0] * len(inputs)
    successors: list[list[int]] = [[] for _ in inputs]
    for index, given in enumerate(inputs):
        for name, value in given.items():
            if not isinstance(value, tuple):
                continue
            _check_reference(f"node {index}: input {name!r}", value, len(inputs))
            num_left[index] += 1
            successors[value[0]].append(index)
    order = [index for index, num in enumerate(num_left) if num == 0]
    for index in order:
        for successor in successors[index]:
            num_left[successor] -= 1
            if num_left[successor] == 0:
                order.append(successor)
    if len(order) < len(inputs):
        names = [f"node {index} (cell {cells[index].name!r})" for index in _cycle(inputs, num_left)]
        few = names if len(names) <= _MAX_NAMED else [*names[:_MAX_NAMED], "others"]
        through = f" through {', '.join(few[1:])}" if few[1:] else ""
        raise CyclicGraphError(
            f"{few[0]} depends on itself{through}; remove one of the edges between them"
        )
    return order


def _cycle(inputs: Sequence[Mapping[str, Any]], num_left: Sequence[int]) -> list[int]:
    """Return the nodes of a cycle, each of which takes an output of the next one."""
    # Every such node has such a predecessor, so the path returns to a node on it.
    path: dict[int, int] = {}  # node -> its place
    node = next(index for index, num in enumerate(num_left) if num)
    while node not in path:
        path[node] = len(path)
        references = [value[0] for value in inputs[node].values() if isinstance(value, tuple)]
        node = next(index for index in references if num_left[index])
    return list(path)[path[node] :]
