"""Gated recurrent cells whose inputs are rows of larger arrays: gather, product and gates."""

from jaxserve.kernels.gated_cell.api import gated_cell
from jaxserve.kernels.gated_cell.cpu import Column, TaskColumns, gated_tasks, pack_gates
from jaxserve.kernels.gated_cell.operands import KINDS, GatedCell, Kind, Product, RowsAt, rows_at

__all__ = [
    "KINDS",
    "Column",
    "GatedCell",
    "Kind",
    "Product",
    "RowsAt",
    "TaskColumns",
    "gated_cell",
    "gated_tasks",
    "pack_gates",
    "rows_at",
]
