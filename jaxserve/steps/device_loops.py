"""The XLA option with which a GPU runs a decode loop without asking its host."""

from __future__ import annotations

import os
from typing import Any

from jaxserve.steps.placement import Placement

_OPTION = "xla_gpu_enable_command_buffer"
# What is recorded in a CUDA graph: XLA's default set, and loops, which are not in it.
_RECORDED = (
    *("FUSION", "CUBLAS", "CUBLASLT", "CUSTOM_CALL", "CUDNN", "DYNAMIC_SLICE_FUSION"),
    *("CONDITIONAL", "WHILE"),
)


def loop_options(place: Placement) -> dict[str, Any] | None:
    """Return the compiler options of a function with a loop; None for XLA's own choice.

    A loop whose end depends on data is decided on the host after every iteration, unless it is
    recorded in a CUDA graph. A choice in `XLA_FLAGS` precedes ours. A loop with collectives is
    not recorded (docs/performance_model.md).
    """
    platform = next(iter(place.whole.device_set)).platform
    if platform not in ("gpu", "cuda") or _OPTION in os.environ.get("XLA_FLAGS", ""):
        return None
    return {_OPTION: ",".join(_RECORDED)}
