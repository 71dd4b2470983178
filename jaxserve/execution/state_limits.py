"""What some models and placements cannot have, refused before anything is allocated."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from sharding import StagePlan
from sharding.shards import TENSOR


def check_slot_states(
    model_config: Any,
    options: RuntimeOptions,
    *,
    mesh: Mesh | None = None,
    stages: StagePlan | None = None,
    num_processes: int = 1,
    num_device_groups: int = 1,
) -> None:
    """Check options and placement of a model with recurrent layers; others pass.

    Args:
      mesh: of the parameters; None on one device.
      num_processes: that share the parameters.

    Raises:
      InvalidConfigError: naming what is given, what is allowed, and what to do.
    """
    if not model_config.num_recurrent_layers:
        return
    shards = 1 if mesh is None else mesh.shape.get(TENSOR, 1)
    places = {
        "stages": stages is not None,
        f"{num_device_groups} device groups": num_device_groups > 1,
        f"{num_processes} processes": num_processes > 1,
        f"a mesh with tensor={shards}": shards > 1,
    }
    for name, is_given in places.items():
        if is_given:
            raise InvalidConfigError(
                f"{name} for a model with recurrent layers: their states are on one device; omit "
                "mesh, or pass one with a data axis alone"
            )
    # Host pages, which have no states.
    given = {
        name: getattr(options, name)
        for name in ("host_memory", "disk_memory", "restore")
        if getattr(options, name) not in (None, 0)
    }
    if given:
        raise InvalidConfigError(
            f"{given} for a model with recurrent layers: its sequences continue from states, which "
            "pages of the host do not have; omit these options"
        )
    if model_config.num_attention_layers:
        return
    for name in ("kv_dtype", "kv_memory"):
        if getattr(options, name) is not None:
            raise InvalidConfigError(
                f"{name}={getattr(options, name)!r} for a model without attention, which has no "
                f"keys and values; omit {name}, and pass max_slots to bound its memory"
            )


def check_speculation(model_config: Any, options: RuntimeOptions) -> None:
    """Check that a model can speculate, if the options ask for it.

    Raises:
      InvalidConfigError: naming what is given, what is allowed, and what to do.
    """
    if options.speculation is not None and model_config.num_recurrent_layers:
        raise InvalidConfigError(
            f"speculation={options.speculation!r} is not supported for a model with recurrent "
            "layers, whose states cannot go back; omit it, or serve a decoder with attention alone"
        )
