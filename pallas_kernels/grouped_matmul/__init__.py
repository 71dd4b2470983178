"""The product of groups of tokens with one matrix each; `grouped_matmul` is the public function."""

from jaxserve.kernels.grouped_matmul.api import grouped_matmul

__all__ = ["grouped_matmul"]
