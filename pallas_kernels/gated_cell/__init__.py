"""Gated recurrent cells whose inputs are rows of larger arrays: gather, product and gates."""

from pallas_kernels.gated_cell.api import gated_cell
from pallas_kernels.gated_cell.kinds import KINDS, Kind
from pallas_kernels.gated_cell.operands import Product, RowsAt, rows_at

__all__ = ["KINDS", "Kind", "Product", "RowsAt", "gated_cell", "rows_at"]
