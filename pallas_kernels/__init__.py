"""Device kernels: attention over paged, non-contiguous KV, and the other operations of a step.

Each operation is a folder with its public signature, a slow and obvious reference, its
implementations, and the named shapes that tests and benchmarks share.
"""

from jaxserve.kernels.fused_matmul import RMSScale, fused_matmul
from jaxserve.kernels.gated_cell import Product, RowsAt, gated_cell
from jaxserve.kernels.grouped_matmul import grouped_matmul
from jaxserve.kernels.kv_write import RopeTables, apply_rope, kv_write, quantize, rotate_and_write
from jaxserve.kernels.low_rank import add_low_rank
from jaxserve.kernels.matmul import columns_of, from_panels, matmul, panel_matmul, to_panels
from jaxserve.kernels.page_copy import gather_pages, move_pages, scatter_pages
from jaxserve.kernels.paged_attention import Rows, paged_attention
from jaxserve.kernels.pointwise import gated_silu, layer_norm, log_sum_exp, rms_norm, row_maximum
from jaxserve.kernels.quantised_matmul import PackedMatrix, dequantise, quantised_matmul
from jaxserve.kernels.whole_attention import whole_attention

__all__ = [
    "PackedMatrix",
    "Product",
    "RMSScale",
    "RopeTables",
    "Rows",
    "RowsAt",
    "add_low_rank",
    "apply_rope",
    "columns_of",
    "dequantise",
    "from_panels",
    "fused_matmul",
    "gated_cell",
    "gated_silu",
    "gather_pages",
    "grouped_matmul",
    "kv_write",
    "layer_norm",
    "log_sum_exp",
    "matmul",
    "move_pages",
    "paged_attention",
    "panel_matmul",
    "quantised_matmul",
    "quantize",
    "rms_norm",
    "rotate_and_write",
    "row_maximum",
    "scatter_pages",
    "to_panels",
    "whole_attention",
]
