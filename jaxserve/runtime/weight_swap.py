"""New weights that are placed beside the present ones, and the exchange of the two."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, final

import jax
from flax import nnx

from jaxserve.core.errors import EngineFailedError, InvalidParamsError
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

    def check(self, place: object, *, has_weights: bool) -> None:
        """Raise InvalidParamsError unless they can serve now; they were checked some time ago.

        Args:
          place: that they are for; where it is another, `params` are placed again.
          has_weights: whether there are weights that `params` can be a part of.
        """
        check_part(self.partial, has_weights=has_weights)
        used = self.fitted if place == self.place else self.params
        arrays = (leaf for leaf in jax.tree.leaves(used) if isinstance(leaf, jax.Array))
        if any(array.is_deleted() for array in arrays):
            raise InvalidParamsError(
                "an array of the prepared parameters was deleted since, as donated arrays are; the "
                "present weights go on serving. Do not donate parameters before they were updated"
            )


def check_part(partial: bool, *, has_weights: bool) -> None:
    """Raise InvalidParamsError if some parameters come where the others were dropped."""
    if partial and not has_weights:
        raise InvalidParamsError(
            "partial=True is not allowed, because the weights were dropped (rt.sleep); pass all "
            "parameters"
        )


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
