"""Which models can have weights in few bits."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from pallas_kernels import build
from sharding import DeviceGroups, StagePlan


def check_quantised(
    options: RuntimeOptions, mesh: Mesh | StagePlan | DeviceGroups | None, dtype: str
) -> None:
    """Raise InvalidConfigError where weights in few bits cannot be served.

    Args:
      dtype: the model's.
    """
    is_alone = mesh is None and jax.default_backend() == "cpu"
    if options.quantize == "bf16" and not (is_alone and dtype == "float32"):
        raise InvalidConfigError(
            "quantize='bf16' stores the weights of a float32 model in 16 bits for the kernel of "
            f"one CPU, and this model is in {dtype} on {jax.default_backend()!r}"
            + ("" if mesh is None else " with a mesh")
            + "; pass dtype='bfloat16' for weights and activations in 16 bits"
        )
    if options.quantize == "bf16" and not build.has_compiler():
        raise InvalidConfigError(
            "quantize='bf16' needs a C++ compiler for its kernel, and there is none; install g++ "
            "or clang++, or omit quantize"
        )
    groups = mesh.both if isinstance(mesh, DeviceGroups) else (mesh,)
    if any(
        isinstance(group, StagePlan) or (group is not None and group.shape.get("stage", 1) > 1)
        for group in groups
    ):
        raise InvalidConfigError(
            f"quantize={options.quantize!r} is not supported for a model that is cut into stages; "
            "pass a mesh without stages (tensor, data), or omit quantize"
        )
