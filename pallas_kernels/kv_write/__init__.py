"""Writing keys and values into pages: `kv_write` is the one public entry."""

from pallas_kernels.kv_write.api import kv_write
from pallas_kernels.kv_write.quantize import quantize

__all__ = ["kv_write", "quantize"]
