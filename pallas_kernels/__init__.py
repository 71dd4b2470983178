"""Attention over paged, non-contiguous KV and the few other device kernels.

Each operation is a folder: its public signature, a slow and obvious reference, its
implementations, and the named shapes that tests and benchmarks share.
"""

from pallas_kernels.kv_write import kv_write, quantize
from pallas_kernels.matmul import matmul
from pallas_kernels.paged_attention import Rows, paged_attention

__all__ = ["Rows", "kv_write", "matmul", "paged_attention", "quantize"]
