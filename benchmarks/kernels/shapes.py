"""The shapes at which kernels are timed, by kind and by name."""

from __future__ import annotations

from typing import Any

from jaxserve.core.errors import InvalidConfigError
from pallas_kernels.fused_matmul import shapes as fused_shapes
from pallas_kernels.gated_cell import shapes as cell_shapes
from pallas_kernels.kv_write import shapes as write_shapes
from pallas_kernels.page_copy import shapes as copy_shapes
from pallas_kernels.paged_attention.shapes import (
    BENCHMARK_SHAPES,
    GPU_DECODE_SHAPES,
    GPU_MIXED_SHAPES,
    GPU_PREFILL_SHAPES,
    AttentionShape,
)
from pallas_kernels.quantised_matmul import shapes as product_shapes

SHAPES = {
    "decode": GPU_DECODE_SHAPES,
    "prefill": GPU_PREFILL_SHAPES,
    "mixed": GPU_MIXED_SHAPES,
    "small": BENCHMARK_SHAPES,
}
MOVES = {
    "write": write_shapes.CONFIGURATIONS,
    "copy": copy_shapes.CONFIGURATIONS,
    "cell": cell_shapes.CONFIGURATIONS,
    "fused": fused_shapes.CONFIGURATIONS,
    "small_moves": (
        *write_shapes.SMALL_CONFIGURATIONS,
        *copy_shapes.SMALL_CONFIGURATIONS,
        *cell_shapes.SMALL_CONFIGURATIONS,
    ),
}
PRODUCTS = {
    "product": product_shapes.CONFIGURATIONS,
    "small_products": product_shapes.SMALL_CONFIGURATIONS,
}
OTHERS = {**MOVES, **PRODUCTS}


def chosen(kinds: str, left_out: str = "") -> tuple[list[AttentionShape], list[Any]]:
    """Return shapes of attention, each once, and moves and products.

    Args:
      kinds: kinds or names of shapes, separated by commas.
      left_out: shapes to leave out, likewise.

    Raises:
      InvalidConfigError: an unknown kind or name.
    """
    named = {shape.name: (shape,) for shapes in SHAPES.values() for shape in shapes}
    known = {**SHAPES, **named}

    def members(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = sorted(set(names) - {*known, *OTHERS})
        if unknown:
            raise InvalidConfigError(
                f"unknown shapes {unknown}; give some of {(*SHAPES, *OTHERS)}, or names of shapes"
            )
        return names

    excluded = {shape.name for name in members(left_out) for shape in known.get(name, ())}
    shapes = {
        shape.name: shape
        for name in members(kinds)
        for shape in known.get(name, ())
        if shape.name not in excluded
    }
    return list(shapes.values()), [each for name in members(kinds) for each in OTHERS.get(name, ())]
