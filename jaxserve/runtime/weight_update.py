"""New weights: the settings of an update, weights placed in advance, and their exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final, get_args

from flax import nnx

from jaxserve.core.errors import EngineFailedError, InvalidConfigError, InvalidParamsError
from jaxserve.engine.answers import Weights
from jaxserve.engine.loop import Running, check_running
from jaxserve.execution.device_errors import out_of_memory_as
from jaxserve.execution.weights import check_stored, check_usable
from jaxserve.models.config import DecoderConfig
from jaxserve.models.decoder import LayerLayout
from jaxserve.models.quantisation import Quantiser
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.runtime.adapters import Adapters
from jaxserve.runtime.replicas import Replica, Replicas
from jaxserve.runtime.timings import Timings
from jaxserve.sharding import split_replicas
from jaxserve.steps.step_function import has_deleted

# Treatment of the KV of requests that continue after an update.
KV = Literal["recompute", "keep"]
_MAX_VERSION = 2**63 - 1


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
        if has_deleted(self.fitted if place == self.place else self.params):
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


@final
class WeightUpdater:
    """Replaces the weights of a runtime's replicas. `Runtime` documents each method.

    `quantiser` is None for dense weights.
    """

    def __init__(
        self,
        replicas: Replicas,
        timings: Timings,
        adapters: Adapters,
        quantiser: Quantiser | None = None,
    ):
        self._replicas = replicas
        self._timings = timings
        self._adapters = adapters
        self._quantiser = quantiser

    @property
    def weights(self) -> Weights:
        """The weights of the next steps, which change only in pauses."""
        return self._replicas.first.engine.weights

    def update(self, params: Any, update: WeightUpdate) -> int:
        update.after(self.weights)  # before any request is cancelled or starts again
        new = params if isinstance(params, PreparedParams) else None
        new = new or self.prepare(params, partial=update.partial)
        if new.owner is not self:
            raise InvalidParamsError(
                "parameters that another runtime has prepared are not allowed; call "
                "prepare_params on this one"
            )
        with self._replicas.paused(update.running):
            new.check(self._place, has_weights=self._replicas.have_weights)
            fitted = new.fitted
            # Devices may have moved to another group, or another update or adapter may have come.
            if self._place != new.place:
                with placing_weights():
                    fitted = self._fitted(new.params, new.partial)
            weights = update.after(self.weights)
            swap(self._replicas.all, fitted, weights, keeps_kv=update.kv == "keep")
            self._replicas.have_weights = True
        return weights.version

    def prepare(self, params: Any, *, partial: bool) -> PreparedParams:
        if isinstance(params, nnx.Module):
            params = nnx.state(params, nnx.Param)
        check_usable(params)
        check_part(partial, has_weights=self._replicas.have_weights)
        with placing_weights():
            if self._quantiser is not None:
                given, params = params, self._quantiser.params(params, partial=partial)
                check_stored(params, given)
            with self._replicas.placing:
                place = self._place  # read before, so that a change in between is noticed
                fitted = self._fitted(params, partial)
                return PreparedParams(self, params, partial, place, fitted)

    @property
    def _place(self) -> object:
        """A value that changes when prepared parameters would have to be placed again."""
        return self._timings.devices, self.weights, self._adapters.generation

    def save_pretrained(
        self,
        folder: str | Path,
        config: DecoderConfig,
        layer_layout: LayerLayout,
        like: str | Path | Mapping[str, Any],
        tokenizer: Tokenizer | None,
    ) -> None:
        from jaxserve.models.saving import save_pretrained  # reads every form of file

        self._replicas.check_has_weights("rt.save_pretrained()")
        params = self._replicas.first.executor.whole_params
        if params is None:
            raise InvalidConfigError(
                "weights in stages, on two groups of devices or on several processes cannot be "
                "saved; load them in one process with a mesh without stages, or none"
            )
        save_pretrained(
            folder,
            params,
            config,
            like,
            layer_layout=layer_layout,
            tokenizer=tokenizer,
        )

    def _fitted(self, params: Any, partial: bool) -> list[Any]:
        """Return new parameters on the devices of each replica."""
        params = self._adapters.with_adapters(params, partial=partial)
        replicas = self._replicas.all
        parts = split_replicas(params)
        if len(parts) != len(replicas):  # the parameters are on other devices than the replicas
            parts = [params] * len(replicas)
        return [
            replica.executor.fitted(part, partial=partial)
            for replica, part in zip(replicas, parts, strict=True)
        ]
