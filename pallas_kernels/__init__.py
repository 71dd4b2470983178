"""Device kernels: attention over paged, non-contiguous KV, and a few others.

Each operation is a folder with its public signature, a slow and obvious reference, its
implementations, and the named shapes that tests and benchmarks share.
"""

from pallas_kernels.gated_cell import Product, RowsAt, gated_cell
from pallas_kernels.kv_write import RopeTables, apply_rope, kv_write, quantize, rotate_and_write
from pallas_kernels.matmul import matmul
from pallas_kernels.page_copy import gather_pages, move_pages, scatter_pages
from pallas_kernels.paged_attention import Rows, paged_attention
from pallas_kernels.quantised_matmul import PackedMatrix, dequantise, quantised_matmul

__all__ = [
    "PackedMatrix",
    "Product",
    "RopeTables",
    "Rows",
    "RowsAt",
    "apply_rope",
    "dequantise",
    "gated_cell",
    "gather_pages",
    "kv_write",
    "matmul",
    "move_pages",
    "paged_attention",
    "quantised_matmul",
    "quantize",
    "rotate_and_write",
    "scatter_pages",
]
