"""Evaluation of a graph of cells, one node after the other: the reference of the runtime."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.cells import Graph
from jaxserve.cells.graph import Chain, Node, Output, Steps, Tree


def evaluate(graph: Graph) -> dict[str, Any]:
    """Return the values of the graph's outputs, or what its `then` makes of them."""
    values: dict[Node, list[dict[str, Any]]] = {}
    while True:
        for node in graph.nodes:
            values[node] = _steps(node, values)
        found = {name: _result(result, values) for name, result in graph.outputs.items()}
        after = found if graph.then is None else graph.then(found)
        if not isinstance(after, Graph):
            return after
        graph = after


def _result(result: Any, values: dict[Node, list[dict[str, Any]]]) -> np.ndarray:
    if isinstance(result, Steps):
        steps = values[result.output.node]
        return np.stack([_named(step, result.output) for step in steps])
    if isinstance(result, Output):
        return _named(values[result.node][-1], result)
    return np.stack([_result(one, values) for one in result])


def _steps(node: Node, values: dict[Node, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the outputs of each step of a node; one, except for loops."""
    cell: Any = node.cell
    if isinstance(node.block, Tree):
        return [_root(cell, node.block)]
    inputs = {
        name: values[given.node][-1][list(given.node.cell.outputs)[given.index]]
        if isinstance(given, Output)
        else jnp.asarray(np.broadcast_to(np.asarray(given, spec.dtype), (1, *spec.shape)))
        for (name, spec), given in zip(cell.inputs.items(), node.inputs, strict=True)
    }
    if not cell.is_loop:
        return [_chain(node, inputs)]
    steps = []
    for _ in range(node.max_steps):
        outputs = cell.module(**inputs)
        steps.append(outputs)
        inputs |= {name: outputs[taken] for name, taken in cell.carry.items()}
        if cell.until is not None and bool(cell.until(outputs)[0]):
            break
    return steps


def _chain(node: Node, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the outputs of a node, or of the last one of its chain."""
    cell: Any = node.cell
    outputs = cell.module(**inputs)
    for number in range(1, node.num_nodes):
        assert isinstance(node.block, Chain)
        for name, taken, each in zip(inputs, node.block.form.carry, node.block.each, strict=True):
            if taken >= 0:
                inputs[name] = outputs[list(cell.outputs)[taken]]
            elif each is not None:
                inputs[name] = jnp.asarray(each[number][None])
        outputs = cell.module(**inputs)
    return outputs


def _root(cell: Any, tree: Tree) -> dict[str, Any]:
    """Return the outputs of a tree's root."""
    leaf: Any = tree.form.leaf
    done: list[dict[str, Any]] = []
    for number in range(tree.num_leaves):
        given = zip(leaf.inputs, tree.each, strict=True)
        done.append(leaf.module(**{name: jnp.asarray(each[number][None]) for name, each in given}))
    for pair in tree.shape.pairs.tolist():
        taken = zip(cell.inputs, tree.form.sides, tree.form.outputs, strict=True)
        inputs = {name: done[pair[side]][output] for name, side, output in taken}
        done.append(cell.module(**inputs))
    return done[-1]


def _named(step: dict[str, Any], output: Output) -> np.ndarray:
    return np.asarray(step[list(output.node.cell.outputs)[output.index]])[0]
