"""Attention over a paged KV cache: `paged_attention` is the one public entry."""

from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.rows import Rows

__all__ = ["Rows", "paged_attention"]
