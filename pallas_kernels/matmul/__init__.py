"""The product of activations with a weight, as it is or in panels."""

from pallas_kernels.matmul.api import matmul
from pallas_kernels.matmul.panels import columns_of, from_panels, panel_matmul, to_panels

__all__ = ["columns_of", "from_panels", "matmul", "panel_matmul", "to_panels"]
