"""A product with a weight, fused with the norm, bias, gate and residual around it in a layer."""

from jaxserve.kernels.fused_matmul.api import IMPLEMENTATIONS, fused_matmul
from jaxserve.kernels.fused_matmul.operands import RMSScale

__all__ = ["IMPLEMENTATIONS", "RMSScale", "fused_matmul"]
