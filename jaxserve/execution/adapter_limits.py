"""What cannot be served with adapters, refused before anything is allocated."""

from __future__ import annotations

from typing import Any

import jax

from jaxserve.core.errors import DeviceMemoryError, InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.execution.memory_plan import free_device_bytes
from jaxserve.steps.placement import Placement


def check_adapters(
    model_config: Any, options: RuntimeOptions, params: Any, *, has_mesh: bool, is_quantised: bool
) -> None:
    """Check that a model can be served with adapters, if the options ask for them.

    Args:
      params: on their devices.
      has_mesh: whether a mesh, stages or device groups were given.

    Raises:
      InvalidConfigError: naming what is given, what is allowed, and what to do.
    """
    if not options.max_adapters:
        return
    has_mesh = has_mesh or Placement.like(jax.tree.leaves(params)[0].sharding).mesh is not None
    hindrances = {
        "a mesh, stages or device groups": has_mesh,
        "an encoder-decoder model": model_config.has_encoder,
        "a model with recurrent layers": model_config.num_recurrent_layers > 0,
        "weights in few bits": is_quantised,
    }
    for name, is_given in hindrances.items():
        if is_given:
            raise InvalidConfigError(
                f"max_adapters={options.max_adapters} is not supported for {name}; omit it, or "
                "serve a decoder with dense weights and attention alone on one device "
                "(docs/adapters.md)"
            )


def check_adapters_fit(num_bytes: int, options: RuntimeOptions, params: Any) -> None:
    """Check that the arrays of all adapters fit on the device, before they are allocated.

    Args:
      num_bytes: size of the arrays.
      params: on their device.

    Raises:
      DeviceMemoryError: they do not fit.
    """
    device = next(iter(jax.tree.leaves(params)[0].devices()))
    free = free_device_bytes(device)
    if num_bytes > free:
        raise DeviceMemoryError(
            f"max_adapters={options.max_adapters} of max_adapter_rank={options.adapter_rank} need "
            f"{num_bytes:,} bytes, and {free:,} are free on {device}; pass fewer adapters or a "
            "lower max_adapter_rank"
        )
