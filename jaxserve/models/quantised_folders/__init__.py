"""Hugging Face folders whose weights are in eight or four bits.

GPTQ, AWQ, compressed-tensors and fp8.
"""

from jaxserve.models.quantised_folders.kept import KeptMatrices
from jaxserve.models.quantised_folders.matrix import Method
from jaxserve.models.quantised_folders.methods import method_in, method_of
from jaxserve.models.quantised_folders.source import QuantisedFolder

__all__ = ["KeptMatrices", "Method", "QuantisedFolder", "method_in", "method_of"]
