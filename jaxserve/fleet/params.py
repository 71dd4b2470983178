"""Parameters on their way from a trainer to the replicas of a fleet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx

from jaxserve.core.errors import InvalidParamsError

# By their paths in the model's state.
HostArrays: TypeAlias = Mapping[tuple[Any, ...], np.ndarray]


def host_arrays(params: nnx.State) -> HostArrays:
    """Return parameters as arrays in this process's memory.

    Raises:
      InvalidParamsError: a part of an array is in other processes.
    """
    flat = {path: variable.get_value() for path, variable in nnx.to_flat_state(params)}
    for path, array in flat.items():
        if isinstance(array, jax.Array) and not (
            array.is_fully_addressable or array.is_fully_replicated
        ):
            raise InvalidParamsError(
                f"the parameter {'.'.join(map(str, path))} is spread over several processes, and a "
                "fleet takes parameters from one; gather them there, or save them and pass the path"
            )
    return {path: np.asarray(array) for path, array in flat.items()}


def state_of(arrays: HostArrays) -> nnx.State:
    """Return the state of which `host_arrays` were made, without metadata."""
    return nnx.from_flat_state([(path, nnx.Param(array)) for path, array in arrays.items()])


def check_same_model(path: str, found: Any, served: Any) -> None:
    """Raise InvalidParamsError unless two configurations of models are the same."""
    if type(found) is not type(served):
        raise InvalidParamsError(
            f"{path} is a {type(found).__name__}, and this fleet serves a {type(served).__name__}; "
            "pass weights of the served model"
        )
    wanted = asdict(served)
    other = [name for name, value in asdict(found).items() if value != wanted[name]]
    if other:
        raise InvalidParamsError(
            f"the configuration of {path} has another {', '.join(other)} than the served model; "
            "pass weights of the served model"
        )
