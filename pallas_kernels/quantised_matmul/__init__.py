"""The product of activations with a weight in eight or four bits."""

from jaxserve.kernels.quantised_matmul.api import quantised_matmul
from jaxserve.kernels.quantised_matmul.packing import (
    PANEL,
    PackedMatrix,
    Rounding,
    dequantise,
    dequantised_rows,
    pack,
    quantise,
    quantise_float8,
)

__all__ = [
    "PANEL",
    "PackedMatrix",
    "Rounding",
    "dequantise",
    "dequantised_rows",
    "pack",
    "quantise",
    "quantise_float8",
    "quantised_matmul",
]
