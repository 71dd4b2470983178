"""Gated recurrent cells whose inputs are rows of larger arrays: gather, product and gates."""

from pallas_kernels.gated_cell.api import gated_cell
from pallas_kernels.gated_cell.kinds import KINDS, Kind
from pallas_kernels.gated_cell.operands import GatedCell, Product, RowsAt, rows_at
from pallas_kernels.gated_cell.tasks import Column, TaskColumns, gated_tasks, pack_gates

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
