"""The weights of a fleet: updates of every replica, and those that a new process starts with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

from jaxserve.core.errors import EngineBusyError, ReplicaDiedError
from jaxserve.engine.device_loop import Running
from jaxserve.engine.versions import Weights
from jaxserve.fleet.replica import Replica
from jaxserve.runtime.weight_update import WeightUpdate


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class FleetUpdate:
    """New weights for every replica.

    Attributes:
      source: as `Replica.prepare_params` takes it.
      paths: the parameters that it has; None where they are not known.
      settings: see `Runtime.update_params`.
    """

    source: Any
    paths: frozenset[Any] | None
    settings: WeightUpdate


@final
class NewestWeights:
    """The weights that a process takes before it serves.

    Attributes:
      version: of these weights; 0 for those of the model's own files.
    """

    def __init__(self) -> None:
        self.version = 0
        # The last update of all parameters, and those of a part that followed it, oldest first.
        self._updates: list[FleetUpdate] = []

    def numbered(self, update: FleetUpdate) -> FleetUpdate:
        """Return an update with its version.

        Raises:
          InvalidConfigError: the version is not above the present one.
        """
        weights = update.settings.after(Weights(self.version))
        return replace(update, settings=replace(update.settings, version=weights.version))

    def add(self, update: FleetUpdate) -> None:
        """Take note of a numbered update, and drop those of which nothing is left."""
        former = self._updates if update.settings.partial else []
        left = (_without(each, update.paths) for each in former)
        self._updates = [*filter(None, left), update]
        assert update.settings.version is not None
        self.version = update.settings.version

    async def give_to(self, replica: Replica) -> None:
        """Have a process that has just started compute with these weights.

        Raises:
          JaxserveError: it cannot.
        """
        for update in self._updates:
            settings = update.settings
            await replica.prepare_params(update.source, partial=settings.partial)
            await replica.update_params(
                WeightUpdate(version=settings.version, partial=settings.partial)
            )


def _without(former: FleetUpdate, paths: frozenset[Any] | None) -> FleetUpdate | None:
    """Return what counts of a former update beside a later one of these paths; None for nothing.

    Parts come one on top of the other, so that a process takes what is left of each in their order.
    Nothing is known of the paths of a folder, and all of it counts.
    """
    if former.paths is None or paths is None:
        return former
    left = former.paths - paths
    return replace(former, paths=left) if left else None


class Failed(NamedTuple):
    """A replica that could not do what was asked of it, and why."""

    replica: Replica
    error: ReplicaDiedError


async def prepare(
    replicas: Sequence[Replica], update: FleetUpdate
) -> tuple[list[Failed], BaseException | None]:
    """Have every replica place the weights of a numbered update beside its present ones.

    Returns:
      The replicas that have died meanwhile, and why none may use the weights: a replica cannot take
      them, or all have died. Then the others have dropped them. None if they may.
    """
    partial, version = update.settings.partial, update.settings.version
    found = await asyncio.gather(
        *(each.prepare_params(update.source, partial=partial) for each in replicas),
        return_exceptions=True,
    )
    failed = [
        Failed(each, error)
        for each, error in zip(replicas, found, strict=True)
        if isinstance(error, ReplicaDiedError)
    ]
    refusals = [e for e in found if e is not None and not isinstance(e, ReplicaDiedError)]
    if not refusals and len(failed) < len(replicas):
        return failed, None
    ready = [each for each, error in zip(replicas, found, strict=True) if error is None]
    # One that dies meanwhile is noticed at its next request.
    await asyncio.gather(*(each.drop_prepared() for each in ready), return_exceptions=True)
    if refusals:
        return failed, refusals[0]
    return failed, ReplicaDiedError(
        f"every replica died while it took the weights of version {version}, the last because: "
        f"{failed[-1].error}; new processes start with the former weights"
    )


async def commit(replicas: Sequence[Replica], update: FleetUpdate) -> list[Failed]:
    """Have every replica compute with the weights that it has placed.

    Returns:
      The replicas that could not, and compute with the former ones or nothing.
    """
    found = await asyncio.gather(
        *(each.update_params(update.settings) for each in replicas), return_exceptions=True
    )
    failed = []
    for each, error in zip(replicas, found, strict=True):
        if isinstance(error, ReplicaDiedError):
            failed.append(Failed(each, error))
        elif error is not None:
            said = f"it could not go over to the weights of version {update.settings.version}"
            failed.append(Failed(each, ReplicaDiedError(f"{said}: {error}")))
    return failed


def check_can_end(running: Running, *, is_paused: bool) -> None:
    """Raise EngineBusyError if running requests are to end, and cannot, because of a pause."""
    if is_paused and running == "finish":
        raise EngineBusyError(
            "running='finish' waits for the end of running requests, and the fleet is paused; call "
            "fleet.resume() before it, or pass running='keep'"
        )
