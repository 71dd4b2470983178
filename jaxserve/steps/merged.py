"""The model that a step computes, from its static part and its parameters."""

from __future__ import annotations

from typing import Any, cast

from flax import nnx

from jaxserve.core.config import EngineConfig
from jaxserve.models.row_kernels import RowKernels, use_row_kernels


def merged(graphdef: nnx.GraphDef, params: Any, config: EngineConfig) -> Any:
    """Return the model, with the kernels that the configuration asks for."""
    model = nnx.merge(graphdef, params)
    if config.row_kernels is not None:
        use_row_kernels(model, cast(RowKernels, config.row_kernels))
    return model
