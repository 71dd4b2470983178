"""Causal attention of whole sequences, without a cache, differentiable."""

from jaxserve.kernels.whole_attention.api import whole_attention

__all__ = ["whole_attention"]
