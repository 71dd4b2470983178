"""Named shapes for the gate and the GPU tests of operations that add up a row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import jax

from jaxserve.kernels.pointwise.api import layer_norm, log_sum_exp, rms_norm


@final
@dataclass(frozen=True, kw_only=True)
class Configuration:
    """An operation on rows [rows, width]; `log_sum_exp` takes float32."""

    operation: Literal["rms_norm", "layer_norm", "log_sum_exp"]
    rows: int
    width: int
    dtype: str = "bfloat16"
    donated = ()

    def __str__(self) -> str:
        return f"{self.operation}-{self.rows}x{self.width}-{self.dtype}"

    @property
    def kernels(self) -> frozenset[str]:
        return frozenset({self.operation})

    def call(self) -> tuple[Any, dict[str, Any]]:
        arguments = jax.eval_shape(lambda: make_inputs(self, seed=0))
        if self.operation == "log_sum_exp":
            return partial(log_sum_exp, implementation="triton"), arguments
        norm = rms_norm if self.operation == "rms_norm" else layer_norm
        return partial(norm, eps=1e-5, implementation="triton"), arguments


def make_inputs(configuration: Configuration, seed: int) -> dict[str, Any]:
    each = configuration
    keys = iter(jax.random.split(jax.random.key(seed), 3))

    def normal(*shape: int) -> jax.Array:
        return (3 * jax.random.normal(next(keys), shape)).astype(each.dtype)

    names = {"rms_norm": ("scale",), "layer_norm": ("scale", "bias"), "log_sum_exp": ()}
    parameters = {name: normal(each.width) for name in names[each.operation]}
    return {"x": normal(each.rows, each.width), **parameters}


CONFIGURATIONS = (
    *(Configuration(operation="rms_norm", rows=64, width=width) for width in (128, 4096, 16384)),
    Configuration(operation="rms_norm", rows=1, width=2880, dtype="float32"),
    *(Configuration(operation="layer_norm", rows=64, width=width) for width in (768, 8192)),
    Configuration(operation="layer_norm", rows=1, width=32768, dtype="float32"),
    Configuration(operation="log_sum_exp", rows=64, width=128256, dtype="float32"),
    Configuration(operation="log_sum_exp", rows=1, width=97, dtype="float32"),
)
