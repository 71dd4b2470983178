"""The product of activations with a weight, in its original layout or in panels."""

from jaxserve.kernels.matmul.api import grouped_matmul, matmul
from jaxserve.kernels.matmul.panels import columns_of, from_panels, panel_matmul, to_panels

__all__ = [
    "columns_of",
    "from_panels",
    "grouped_matmul",
    "matmul",
    "panel_matmul",
    "to_panels",
]
