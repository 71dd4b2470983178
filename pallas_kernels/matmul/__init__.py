"""The product of activations with a weight, in its original layout or in panels."""

from jaxserve.kernels.matmul.api import matmul
from jaxserve.kernels.matmul.panels import columns_of, from_panels, panel_matmul, to_panels

__all__ = ["columns_of", "from_panels", "matmul", "panel_matmul", "to_panels"]
