"""Named shapes for the tests and the benchmarks of page copies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp

from jaxserve.kernels.page_copy.api import gather_pages, move_pages, scatter_pages


@final
@dataclass(frozen=True, kw_only=True)
class CopyShape:
    """A copy of `count` pages of a buffer [layers, pages, *page].

    Attributes:
      page: (kv_heads, page_size, head_dim) of keys and values, (kv_heads, page_size) of scales.
    """

    name: str
    layers: int
    num_pages: int
    page: tuple[int, ...]
    dtype: str
    count: int

    def __str__(self) -> str:
        return self.name

    @property
    def array(self) -> tuple[int, ...]:
        return (self.layers, self.num_pages, *self.page)

    @property
    def copied_bytes(self) -> int:
        return self.layers * self.count * math.prod(self.page) * jnp.dtype(self.dtype).itemsize


# Small enough for the reference; some pages fill their blocks, and some do not.
TEST_SHAPES = (
    CopyShape(name="keys", layers=3, num_pages=11, page=(2, 4, 16), dtype="float32", count=5),
    CopyShape(name="odd", layers=2, num_pages=9, page=(3, 8, 40), dtype="bfloat16", count=4),
    CopyShape(name="blocks", layers=1, num_pages=7, page=(3, 16, 96), dtype="float32", count=3),
    CopyShape(name="int8", layers=2, num_pages=9, page=(2, 8, 64), dtype="int8", count=4),
    CopyShape(name="scales", layers=3, num_pages=11, page=(8, 16), dtype="float32", count=5),
    CopyShape(name="slots", layers=1, num_pages=8, page=(96,), dtype="int32", count=4),
)

_SMOLLM2 = CopyShape(
    name="smollm2", layers=1, num_pages=2000, page=(3, 32, 64), dtype="float32", count=8
)

# Llama 3 8B: a swap of one unrolled layer, of all layers, and of 8-bit pages with scales; a resized
# pool; a compaction of slots with 4,096 tokens each.
GPU_SHAPES = (
    CopyShape(
        name="swap_a_layer", layers=1, num_pages=4000, page=(8, 32, 128), dtype="bfloat16", count=8
    ),
    CopyShape(name="swap", layers=32, num_pages=2500, page=(8, 32, 128), dtype="bfloat16", count=8),
    CopyShape(
        name="swap_float8",
        layers=32,
        num_pages=900,
        page=(8, 32, 128),
        dtype="float8_e4m3fn",
        count=8,
    ),
    CopyShape(name="swap_scales", layers=32, num_pages=900, page=(8, 32), dtype="float32", count=8),
    CopyShape(
        name="resize", layers=1, num_pages=8000, page=(8, 32, 128), dtype="bfloat16", count=3000
    ),
    CopyShape(name="slots", layers=1, num_pages=256, page=(4096,), dtype="int32", count=16),
)

OPERATIONS = ("gather_pages", "scatter_pages", "move_pages")


@final
@dataclass(frozen=True)
class Configuration:
    operation: str
    shape: CopyShape
    kernels = frozenset({"copy_pages"})

    def __str__(self) -> str:
        return f"{self.operation}-{self.shape}"

    @property
    def donated(self) -> tuple[str, ...]:
        return () if self.operation == "gather_pages" else ("pages",)

    def call(self) -> tuple[Any, dict[str, Any]]:
        shape = self.shape
        some = (shape.layers, shape.count, *shape.page)
        pages, values = (
            jax.ShapeDtypeStruct(size, jnp.dtype(shape.dtype)) for size in (shape.array, some)
        )
        places = jax.ShapeDtypeStruct((shape.count,), jnp.dtype("int32"))
        if self.operation == "gather_pages":
            return gather_pages, {"pages": pages, "source": places}
        if self.operation == "scatter_pages":
            return scatter_pages, {"pages": pages, "target": places, "values": values}
        return move_pages, {"pages": pages, "source": places, "target": places}


CONFIGURATIONS = tuple(
    Configuration(operation, shape) for operation in OPERATIONS for shape in GPU_SHAPES
)
# Timed on a CPU.
SMALL_CONFIGURATIONS = tuple(Configuration(operation, _SMOLLM2) for operation in OPERATIONS)
