"""Cellular batching for recurrent and tree models (BatchMaker).

    from jaxserve.cells import Cell, CellRuntime, Graph

    lstm = Cell(module, inputs={"x": spec, "h": spec, "c": spec})

    def unfold(xs):
        node = lstm(x=xs[0], h=0.0, c=0.0)
        for x in xs[1:]:
            node = lstm(x=x, h=node["h"], c=node["c"])
        return Graph(outputs={"h": node["h"]})

    with CellRuntime([lstm], unfold) as rt:
        print(rt.generate(sentences)[0]["h"])

Names are imported on first use, so that graphs, policies and simulations do without JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.cells.answers import CellCompletion as CellCompletion
    from jaxserve.cells.answers import CellPiece as CellPiece
    from jaxserve.cells.batchmaker import BatchMaker as BatchMaker
    from jaxserve.cells.cell import Cell as Cell
    from jaxserve.cells.cell import Repeat as Repeat
    from jaxserve.cells.graph import Graph as Graph
    from jaxserve.cells.graph import Node as Node
    from jaxserve.cells.graph import Output as Output
    from jaxserve.cells.runtime import CellRuntime as CellRuntime
    from jaxserve.cells.simulation import SimulatedCell as SimulatedCell

_HOMES = {
    "BatchMaker": "jaxserve.cells.batchmaker",
    "Cell": "jaxserve.cells.cell",
    "CellCompletion": "jaxserve.cells.answers",
    "CellPiece": "jaxserve.cells.answers",
    "CellRuntime": "jaxserve.cells.runtime",
    "Graph": "jaxserve.cells.graph",
    "Node": "jaxserve.cells.graph",
    "Output": "jaxserve.cells.graph",
    "Repeat": "jaxserve.cells.cell",
    "SimulatedCell": "jaxserve.cells.simulation",
}

__all__ = sorted(_HOMES)  # pyrefly: ignore[unresolvable-dunder-all]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxserve.cells' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
