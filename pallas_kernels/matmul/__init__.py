"""The product of activations with a weight, in its original layout or in panels."""

from pallas_kernels.matmul.api import grouped_matmul, matmul
from pallas_kernels.matmul.panels import columns_of, from_panels, panel_matmul, to_panels
from pallas_kernels.matmul.triton import rowwise_product

__all__ = [
    "columns_of",
    "from_panels",
    "grouped_matmul",
    "matmul",
    "panel_matmul",
    "rowwise_product",
    "to_panels",
]
