"""New weights that are placed beside the present ones, and the exchange of the two."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, final

from flax import nnx

from jaxserve.core.errors import EngineFailedError
from jaxserve.engine.versions import Weights
from jaxserve.execution.device_errors import out_of_memory_as
from jaxserve.runtime.replica import Replica


@final
@dataclass(frozen=True, eq=False, repr=False)
class PreparedParams:
    """Checked parameters on the devices of a runtime, which `Runtime.update_params` takes.

    They take memory beside the present ones as long as they are referenced.

    Attributes:
      owner: the part of the runtime that placed them.
      params: as the runtime stores them.
      partial: whether `params` lacks parameters that stay as they are.
      place: what they were placed for; after a change of it they are placed again.
      fitted: for each replica, as its executor takes them.
    """

    owner: object
    params: nnx.State
    partial: bool
    place: object
    fitted: Sequence[Any]


def placing_weights() -> AbstractContextManager[None]:
    """Raise XLA's out-of-memory error in the block as a `DeviceMemoryError`."""
    return out_of_memory_as(
        "placing new weights beside the present ones, which go on serving",
        "pass a smaller kv_memory, or drop the present ones first (rt.sleep(drops_weights=True))",
    )


def swap(
    replicas: Sequence[Replica], fitted: Sequence[Any], weights: Weights, *, keeps_kv: bool
) -> None:
    """Have all replicas compute with other weights, or none of them; their loops are paused.

    Args:
      fitted: for each replica, as its executor takes them.
      weights: their version.
      keeps_kv: see `Engine.weights_changed`.

    Raises:
      EngineFailedError: neither is possible; every loop has failed with this error.
      Exception: another error; all replicas compute with the former weights.
    """
    former = [replica.executor.params for replica in replicas]
    try:
        with placing_weights():
            for replica, params in zip(replicas, fitted, strict=True):
                replica.executor.update_params(params)
            names = [replica.engine.name_of(weights.version) for replica in replicas]
    except BaseException:
        _put_back(replicas, former)
        raise
    try:
        for replica, name in zip(replicas, names, strict=True):
            replica.engine.weights_changed(weights, name, keeps_kv=keeps_kv)
    except BaseException as cause:  # some caches have pages of other weights than their engine
        raise _failed(replicas, cause) from cause


def _put_back(replicas: Sequence[Replica], former: Sequence[Any]) -> None:
    try:
        for replica, params in zip(replicas, former, strict=True):
            replica.executor.update_params(params)
    except BaseException as cause:
        raise _failed(replicas, cause) from cause


def _failed(replicas: Sequence[Replica], cause: BaseException) -> EngineFailedError:
    """End every loop, since replicas may compute with weights of several versions."""
    error = EngineFailedError(
        f"an update of the weights failed in its middle ({type(cause).__name__}: {cause}), and "
        "could not be undone; this runtime serves no more: close it, and create a new one"
    )
    for replica in replicas:
        replica.loop.fail(error)
    return error
