"""A product with a weight together with what stands before and behind it in a layer."""

from pallas_kernels.fused_matmul.api import IMPLEMENTATIONS, fused_matmul
from pallas_kernels.fused_matmul.operands import RMSScale

__all__ = ["IMPLEMENTATIONS", "RMSScale", "fused_matmul"]
