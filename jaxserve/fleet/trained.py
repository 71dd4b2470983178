"""The part of a fleet that a trainer drives."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flax import nnx

from jaxserve.core.errors import InvalidConfigError
from jaxserve.engine.device_loop import Running
from jaxserve.engine.versions import Weights
from jaxserve.execution.weights import check_usable
from jaxserve.fleet.dispatcher import Dispatcher
from jaxserve.fleet.weights import FleetUpdate
from jaxserve.runtime.weight_update import KV, WeightUpdate, check_running


class TrainedFleet(abc.ABC):
    """The methods of `Fleet` for new weights, and for pauses while they come.

    Args:
      send: sends parameters to where every replica can read them, once; returns a reference.
    """

    @abc.abstractmethod
    def __init__(self, dispatcher: Dispatcher, send: Callable[[nnx.State], Any]):
        self._dispatcher = dispatcher
        self._send = send

    @property
    def weights_version(self) -> int:
        """The version of the newest weights; 0 for those that the fleet has loaded."""
        return self._dispatcher.weights_version

    def update_params(
        self,
        params: nnx.State | str | Path,
        *,
        version: int | None = None,
        running: Running | None = None,
        kv: KV = "recompute",
        partial: bool = False,
        max_staleness: int | None = None,
    ) -> int:
        """Replace the weights of every replica, for instance by those of a trainer.

        Arrays go to Ray's object store once, from where every replica reads them, and stay there
        until others have replaced them. Every replica first places the new weights beside its old
        ones. If one cannot, none uses them. When all have placed them, each goes over to them as
        `Runtime.update_params` does, and one that fails or dies now is replaced by a process that
        starts with them. So does every process that replaces another one later. Until the call
        returns, some replicas may answer with the old weights and others with the new ones; each
        token has its version. Ctrl-C ends the wait and not the update.
        `docs/promises/rollouts.md` says what is guaranteed.

        Args:
          params: parameters of this process, of the same structure and shapes; or a model's folder
            or file with the same configuration, as for `Fleet`, which each replica loads.
          version: number of the new weights, above the present one; by default the next number.
          running: treatment of the requests that were submitted before; "keep" by default while the
            fleet is paused, and "finish" otherwise. See `Runtime.update_params`.
          kv, max_staleness: see `Runtime.update_params`.
          partial: whether `params` lacks the parameters that have not changed; not with a path.

        Returns:
          The version of the new weights, which every replica has.

        Raises:
          InvalidParamsError: the parameters do not fit, or have NaN or infinite numbers, or Ray
            cannot hold them.
          ModelError: the folder or file cannot be loaded.
          InvalidConfigError: another argument is not allowed.
          DeviceMemoryError: a replica has no room for them beside the old ones.
          EngineBusyError: running="finish" while the fleet is paused.
          ReplicaDiedError: every replica died as it took the new weights, which none uses; or no
            replica will serve again.
          RuntimeClosedError
          InvalidRequestError: this is the fleet's thread.
        """
        dispatcher = self._dispatcher
        dispatcher.check_may_wait()
        if running is None:
            running = "keep" if dispatcher.is_paused else "finish"
        settings = WeightUpdate(
            version=version, running=running, kv=kv, partial=partial, max_staleness=max_staleness
        )
        settings.after(Weights(dispatcher.weights_version))  # before anything is sent
        if isinstance(params, (str, Path)):
            if partial:
                raise InvalidConfigError(
                    f"partial=True with the path {os.fspath(params)!r} is not allowed, because a "
                    "folder has all parameters; pass an nnx.State of those that have changed"
                )
            return dispatcher.update_params(
                FleetUpdate(source=os.fspath(params), paths=None, settings=settings)
            )
        check_usable(params)
        paths = frozenset(path for path, _ in nnx.to_flat_state(params))
        return dispatcher.update_params(
            FleetUpdate(source=self._send(params), paths=paths, settings=settings)
        )

    def pause(self, running: Running = "keep") -> None:
        """Run no step on any replica from now on, until `resume`; see `Runtime.pause`.

        Requests are accepted meanwhile, and wait. A process that replaces a replica is paused too.

        Raises:
          InvalidConfigError: `running` is unknown.
          EngineBusyError: running="finish" while the fleet is paused.
          RuntimeClosedError
          InvalidRequestError: this is the fleet's thread.
        """
        check_running(running)
        self._dispatcher.pause(running)

    def resume(self) -> None:
        """Run steps again after `pause`; do nothing without a pause.

        Raises:
          RuntimeClosedError
          InvalidRequestError: this is the fleet's thread.
        """
        self._dispatcher.resume()
