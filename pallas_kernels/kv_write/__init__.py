"""Writes of keys and values into pages: `rotate_and_write` for a step, `kv_write` for one array."""

from jaxserve.kernels.kv_write.api import IMPLEMENTATIONS, rotate_and_write
from jaxserve.kernels.kv_write.operands import RopeTables, apply_rope, quantize
from jaxserve.kernels.kv_write.xla import kv_write

__all__ = [
    "IMPLEMENTATIONS",
    "RopeTables",
    "apply_rope",
    "kv_write",
    "quantize",
    "rotate_and_write",
]
