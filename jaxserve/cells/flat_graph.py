"""Graphs as arrays, ready for a scheduler and an executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from jaxserve.cells.base import Chain, Node, Output, Steps
from jaxserve.cells.cell_graph import CellGraph, cell_graph
from jaxserve.cells.graph import Graph, Then, parts_of
from jaxserve.cells.layout import Layout, TypeLayout, words_of, words_of_each
from jaxserve.core.errors import InvalidGraphError, TooManyNodesError, UnknownCellError

# Codes of inputs that are no value of the graph.
ZEROS, WORDS, FIRST_KEPT = -1, -2, -3


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


@final
@dataclass(frozen=True, kw_only=True)
class FlatGraph:
    """A graph as arrays. A value is `row * stride + output`; a row is a node or a large constant.

    Attributes:
      sources: int32 [nodes, max_inputs], the value that each input takes; or `ZEROS`, `WORDS` for a
        constant in `words`, or `FIRST_KEPT - i` for entry i of `kept`.
      words: int32 [nodes, max_words], small constants.
      constants: (pool, array) of the rows after the nodes.
      uses: int32 [rows * stride], how often each value is taken or returned; at least 1 for those
        that a loop carries.
      pools: int8 [rows * stride], the pool of each value; -1 for none.
      num_slots: int64 [pools], slots that its values may need at the same time.
      wanted: (value, what it is for), for every value that the graph returns.
      keep: node and output -> value, for those that the next graph may take.
      kept: values of the graph before it that it takes, as that graph's values.
    """

    graph: CellGraph
    sources: np.ndarray
    words: np.ndarray
    constants: tuple[tuple[int, np.ndarray], ...]
    uses: np.ndarray
    pools: np.ndarray
    num_slots: np.ndarray
    wanted: tuple[tuple[int, Wanted], ...]
    keep: Mapping[tuple[Node, int], int]
    kept: tuple[int, ...]
    then: Then | None

    @property
    def num_nodes(self) -> int:
        return len(self.graph)

    @property
    def num_rows(self) -> int:
        return len(self.graph) + len(self.constants)


def flatten(
    graph: Graph,
    layout: Layout,
    *,
    max_nodes: int,
    kept: Mapping[tuple[Node, int], int] | None = None,
) -> FlatGraph:
    """Return a graph as arrays.

    Args:
      kept: values of the graph before it that were kept.

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
    return _Flattener(graph, layout, kept or {}).flat_graph()


@final
class _Flattener:
    def __init__(self, graph: Graph, layout: Layout, kept: Mapping[tuple[Node, int], int]):
        self._graph = graph
        self._layout = layout
        self._known = kept
        # Of a chain, the row of its last node.
        self._row_of: dict[Node, int] = {}
        self._types: list[int] = []
        self._max_steps: list[int] = []
        self._sources: list[list[int]] = []
        self._predecessors: list[tuple[int, ...]] = []
        self._words = np.zeros((graph.num_nodes, max(1, layout.max_words)), np.int32)
        self._constants: list[tuple[int, np.ndarray]] = []
        # Codes of large constants by the array's identity.
        self._codes: dict[tuple[int, int], int] = {}
        self._kept: dict[int, int] = {}
        self._types_of: dict[int, TypeLayout] = {}

    def flat_graph(self) -> FlatGraph:
        for node in self._graph.nodes:
            self._add(len(self._types), node)
            if node.chain is not None and node.num_nodes > 1:
                self._extend(len(self._types), node, node.chain)
            self._row_of[node] = len(self._types) - 1
        layout, stride = self._layout, self._layout.stride
        num_rows = len(self._sources) + len(self._constants)
        sources = np.array(self._sources, np.int32)
        wanted = self._wanted()
        keep = {(one.node, one.index): self._value(one) for one in self._graph.keep}
        taken = [sources[sources >= 0], [value for value, _ in wanted], list(keep.values())]
        uses = np.bincount(
            np.concatenate(taken).astype(np.int64), minlength=num_rows * stride
        ).astype(np.int32)
        pools = np.full((num_rows, stride), -1, np.int8)
        types = np.array(self._types)
        for t in layout.types:
            rows = np.flatnonzero(types == t.index)
            if not rows.size:
                continue
            pools[rows, : t.num_outputs] = t.output_pools
            if t.is_loop:
                assert layout.done_pool is not None
                pools[rows, t.num_outputs] = layout.done_pool
                for held in {*(output for output in t.carry if output >= 0), t.num_outputs}:
                    uses.reshape(num_rows, stride)[rows, held] += 1
        for number, (pool, _) in enumerate(self._constants):
            pools[len(types) + number, 0] = pool
        pools = pools.ravel()
        used = pools[uses > 0]
        graph = cell_graph(
            tuple(self._types),
            tuple(self._predecessors),
            tuple(self._max_steps),
            layout.loop_types,
        )
        graph.prepare()
        return FlatGraph(
            graph=graph,
            sources=sources,
            words=self._words,
            constants=tuple(self._constants),
            uses=uses,
            pools=pools,
            num_slots=np.bincount(used[used >= 0], minlength=len(layout.pools)),
            wanted=tuple(wanted),
            keep=keep,
            kept=tuple(self._kept),
            then=self._graph.then,
        )

    def _add(self, row: int, node: Node) -> None:
        t = self._types_of.get(id(node.cell)) or self._type_of(node)
        stride, row_of = self._layout.stride, self._row_of
        codes: list[int] = []
        before: list[int] = []
        for number, value in enumerate(node.inputs):
            if type(value) is Output:
                other = row_of.get(value.node)
                if other is None:
                    codes.append(self._kept_code(node, value))
                    continue
                codes.append(other * stride + value.index)
                if other not in before:
                    before.append(other)
                continue
            words = t.words[number]
            if words is not None:
                if type(value) is int:
                    self._words[row, words.start] = value
                else:
                    self._words[row, words.start : words.stop] = words_of(np.asarray(value))
                codes.append(WORDS)
            else:
                codes.append(self._constant_code(t.input_pools[number], np.asarray(value)))
        codes += [ZEROS] * (self._layout.max_inputs - len(codes))
        self._types.append(t.index)
        self._max_steps.append(node.max_steps)
        self._sources.append(codes)
        self._predecessors.append(tuple(before))

    def _extend(self, row: int, node: Node, chain: Chain) -> None:
        """Add the nodes of a chain after its first, from a row on."""
        num, end = chain.length - 1, row + chain.length - 1
        t, stride = self._types_of[id(node.cell)], self._layout.stride
        codes = np.tile(np.array(self._sources[-1], np.int32), (num, 1))
        self._words[row:end] = self._words[row - 1]
        before = np.arange(row - 1, end - 1) * stride
        others: list[int] = []
        for number, (output, each) in enumerate(zip(chain.carry, chain.each, strict=True)):
            words = t.words[number]
            if output >= 0:
                codes[:, number] = before + output
            elif each is None:
                if self._sources[-1][number] >= 0:
                    others.append(self._sources[-1][number] // stride)
            elif words is not None:
                self._words[row:end, words.start : words.stop] = words_of_each(each[1:])
            else:
                pool = t.input_pools[number]
                codes[:, number] = [self._new_constant(pool, value) for value in each[1:]]
        others = [other for other in dict.fromkeys(others) if other < self._graph.num_nodes]
        self._types += [t.index] * num
        self._max_steps += [1] * num
        self._sources += codes.tolist()
        self._predecessors += [(other, *others) for other in range(row - 1, end - 1)]

    def _type_of(self, node: Node) -> TypeLayout:
        index = self._layout.index_of.get(node.cell.key)
        if index is None:
            names = ", ".join(repr(t.cell.name) for t in self._layout.types)
            raise UnknownCellError(
                f"{node} is not of a cell of this runtime, whose cells are {names}; create the "
                "runtime with all cells"
            )
        found = self._types_of[id(node.cell)] = self._layout.types[index]
        return found

    def _kept_code(self, node: Node, value: Output) -> int:
        known = self._known.get((value.node, value.index))
        if known is None:
            raise InvalidGraphError(
                f"{node} takes {value}, of another graph; list it in that graph's keep, and take "
                "it in the graph that its `then` returns"
            )
        return FIRST_KEPT - self._kept.setdefault(known, len(self._kept))

    def _constant_code(self, pool: int, value: np.ndarray) -> int:
        key = pool, id(value)
        code = self._codes.get(key)
        if code is None:
            code = self._codes[key] = self._new_constant(pool, value)
        return code

    def _new_constant(self, pool: int, value: np.ndarray) -> int:
        if not value.any():
            return ZEROS
        row = self._graph.num_nodes + len(self._constants)
        self._constants.append((pool, value))
        return row * self._layout.stride

    def _wanted(self) -> list[tuple[int, Wanted]]:
        found = []
        for name, result in self._graph.outputs.items():
            if isinstance(result, Output | Steps):
                one = parts_of(result)[0]
                found.append((self._value(one), Wanted(name, is_steps=isinstance(result, Steps))))
            else:
                found += [(self._value(one), Wanted(name, i)) for i, one in enumerate(result)]
        return found

    def _value(self, output: Output) -> int:
        row: Any = self._row_of.get(output.node)
        if row is None:
            raise InvalidGraphError(
                f"the graph returns or keeps {output}, which an earlier graph computed; use it "
                "there, or pass it through a cell"
            )
        return row * self._layout.stride + output.index
