"""The product of activations with a weight."""

from pallas_kernels.matmul.api import matmul

__all__ = ["matmul"]
