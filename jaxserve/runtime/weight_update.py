"""New weights: the settings of an update, weights placed in advance, and the exchange."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, final, get_args

import jax
from flax import nnx

from jaxserve.core.errors import EngineFailedError, InvalidConfigError, InvalidParamsError
from jaxserve.engine.device_loop import Running
from jaxserve.engine.versions import Weights
from jaxserve.execution.device_errors import out_of_memory_as
from jaxserve.runtime.replicas import Replica

# Treatment of the KV of requests that continue after an update.
KV = Literal["recompute", "keep"]
_MAX_VERSION = 2**63 - 1


def check_running(running: Running) -> None:
    """Raise InvalidConfigError for an unknown treatment of running requests."""
    if running not in get_args(Running):
        raise InvalidConfigError(f"running={running!r} is unknown; pass one of {get_args(Running)}")


@final
@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """The settings of one `Runtime.update_params`; invalid ones raise InvalidConfigError."""

    version: int | None = None
    running: Running = "finish"
    kv: KV = "recompute"
    partial: bool = False
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        check_running(self.running)
        if self.kv not in get_args(KV):
            raise InvalidConfigError(f"kv={self.kv!r} is unknown; pass one of {get_args(KV)}")
        if self.kv == "keep" and self.running != "keep":
            raise InvalidConfigError(
                f"kv='keep' with running={self.running!r} is not allowed, because no request goes "
                "on; pass running='keep', or omit kv"
            )
        most = self.max_staleness
        if most is not None and (not _is_int(most) or most < 0):
            raise InvalidConfigError(
                f"max_staleness={most!r} is not allowed; pass a number of versions of at least 0, "
                "or omit it for no bound"
            )

    def after(self, weights: Weights) -> Weights:
        """Return the following weights; raise InvalidConfigError unless their version is above."""
        version = weights.version + 1 if self.version is None else self.version
        if not _is_int(version) or not weights.version < version <= _MAX_VERSION:
            raise InvalidConfigError(
                f"version={version!r} is not allowed; the present weights have version "
                f"{weights.version}, and versions increase. Pass a larger whole number, or omit it "
                "to count"
            )
        oldest = 0 if self.max_staleness is None else version - self.max_staleness
        return Weights(version, oldest)


def _is_int(value: object) -> bool:
    """Return whether a value is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


@final
@dataclass(frozen=True, eq=False, repr=False)
class PreparedParams:
    """Checked parameters on the devices of a runtime, which `Runtime.update_params` takes.

    They take memory in addition to the present ones as long as they are referenced. `owner` is the
    part of the runtime that placed them, for the `place` of that time. `params` are as the runtime
    stores them, and `fitted` has them for each replica, as its executor takes them. If `partial`,
    `params` lacks parameters that stay as they are.
    """

    owner: object
    params: nnx.State
    partial: bool
    place: object
    fitted: Sequence[Any]

    def check(self, place: object, *, has_weights: bool) -> None:
        """Raise InvalidParamsError unless they can serve now; they were checked some time ago."""
        check_part(self.partial, has_weights=has_weights)
        used = self.fitted if place == self.place else self.params
        arrays = (leaf for leaf in jax.tree.leaves(used) if isinstance(leaf, jax.Array))
        if any(array.is_deleted() for array in arrays):
            raise InvalidParamsError(
                "an array of the prepared parameters was deleted since, as donated arrays are; the "
                "present weights go on serving. Do not donate parameters before they were updated"
            )


def check_part(partial: bool, *, has_weights: bool) -> None:
    """Raise InvalidParamsError for a partial update of weights that were dropped."""
    if partial and not has_weights:
        raise InvalidParamsError(
            "partial=True is not allowed, because the weights were dropped (rt.sleep); pass all "
            "parameters"
        )


def placing_weights() -> AbstractContextManager[None]:
    return out_of_memory_as(
        "placing new weights beside the present ones, which go on serving",
        "pass a smaller kv_memory, or drop the present ones first (rt.sleep(drops_weights=True))",
    )


def swap(
    replicas: Sequence[Replica], fitted: Sequence[Any], weights: Weights, *, keeps_kv: bool
) -> None:
    """Replace the weights of all replicas, or of none; their loops are paused.

    `fitted` has, for each replica, parameters as its executor takes them.

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
    """Fail every loop, since replicas may have weights of several versions."""
    error = EngineFailedError(
        f"an update of the weights failed in its middle ({type(cause).__name__}: {cause}), and "
        "could not be undone; this runtime serves no more: close it, and create a new one"
    )
    for replica in replicas:
        replica.loop.fail(error)
    return error
