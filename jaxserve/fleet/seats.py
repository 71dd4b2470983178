"""The seats of a fleet: its replicas, their starts and deaths, and their common weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

from jaxserve.core.errors import EngineBusyError, JaxserveError, ReplicaDiedError
from jaxserve.engine.answers import Weights
from jaxserve.engine.loop import Running
from jaxserve.fleet.replica import ReplicaProcess, Role, Started
from jaxserve.runtime.weight_update import WeightUpdate

_log = logging.getLogger(__name__)

# Number of processes of one replica that may die in a row before one serves.
_MAX_STARTS = 3


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class FleetUpdate:
    """New weights for every replica; `source` is as `ReplicaProcess.prepare_params` takes it.

    `paths` are the parameters that it has; None if they are unknown.
    """

    source: Any
    paths: frozenset[Any] | None
    settings: WeightUpdate


@final
class NewestWeights:
    """The weights that a process takes before it serves; version 0 is the model's own files."""

    def __init__(self) -> None:
        self.version = 0
        # The last update of all parameters, and the later updates of a part, oldest first.
        self._updates: list[FleetUpdate] = []

    def numbered(self, update: FleetUpdate) -> FleetUpdate:
        weights = update.settings.after(Weights(self.version))
        return replace(update, settings=replace(update.settings, version=weights.version))

    def add(self, update: FleetUpdate) -> None:
        """Record a numbered update, and drop former ones that it replaces as a whole."""
        former = self._updates if update.settings.partial else []
        left = (_without(each, update.paths) for each in former)
        self._updates = [*filter(None, left), update]
        assert update.settings.version is not None
        self.version = update.settings.version

    async def give_to(self, replica: ReplicaProcess) -> None:
        """Install these weights in a process that has just started."""
        for update in self._updates:
            settings = update.settings
            await replica.prepare_params(update.source, partial=settings.partial)
            await replica.update_params(
                WeightUpdate(version=settings.version, partial=settings.partial)
            )


def _without(former: FleetUpdate, paths: frozenset[Any] | None) -> FleetUpdate | None:
    """Return the rest of a former update after a later one of these paths; None for nothing.

    A process takes the rests of partial updates in order. A folder's paths are unknown, so all of
    it counts.
    """
    if former.paths is None or paths is None:
        return former
    left = former.paths - paths
    return replace(former, paths=left) if left else None


class Failed(NamedTuple):
    """A replica that failed a request of the fleet, and why."""

    replica: ReplicaProcess
    error: ReplicaDiedError


async def prepare(
    replicas: Sequence[ReplicaProcess], update: FleetUpdate
) -> tuple[list[Failed], BaseException | None]:
    """Load the weights of a numbered update on every replica, next to its current ones.

    Return the replicas that have died meanwhile, and why none may use the weights (a replica cannot
    take them, or all have died; then the other replicas have dropped them), or None.
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
    # A replica that dies meanwhile is noticed at its next request.
    await asyncio.gather(*(each.drop_prepared() for each in ready), return_exceptions=True)
    if refusals:
        return failed, refusals[0]
    return failed, ReplicaDiedError(
        f"every replica died while it took the weights of version {version}, the last because: "
        f"{failed[-1].error}; new processes start with the former weights"
    )


async def commit(replicas: Sequence[ReplicaProcess], update: FleetUpdate) -> list[Failed]:
    """Switch every replica to the loaded weights; return the replicas that could not.

    They compute with the former weights, or have died.
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


@final
@dataclass(eq=False)
class Seat:
    """The place of one replica in the fleet; a new process takes it when its process dies."""

    replica: ReplicaProcess
    role: Role = "whole"
    started: Started | None = None
    error: JaxserveError | None = None
    num_unfinished: int = 0
    num_deaths: int = 0
    weights_version: int = 0

    @property
    def answers(self) -> bool:
        """Whether its replica answers requests, and not only computes prompts."""
        return self.role != "prefill"

    def serve(self, started: Started, weights_version: int) -> None:
        self.started = started
        self.weights_version = weights_version

    def take(self, weights_version: int) -> None:
        """Record the version of the weights that the replica computes with."""
        self.weights_version = weights_version

    def give_to(self, replica: ReplicaProcess) -> None:
        """Take a new replica after the previous one died as it started."""
        self.replica.kill()
        self.replica = replica

    def replace(self, replica: ReplicaProcess) -> None:
        """Take a new replica after the one that served has died."""
        self.give_to(replica)
        self.started = None
        self.num_deaths += 1
        self.num_unfinished = 0

    def fail(self, error: JaxserveError) -> None:
        """Continue without a replica."""
        self.replica.kill()
        self.error = error


@final
class Seats:
    """The seats of a fleet. A replica that dies is replaced by a new process, with its weights.

    Its coroutines, and all state, belong to the thread of one asyncio loop. `make_replica` returns
    a new replica and must not wait; `on_death` gets the index of a seat whose replica has died.
    """

    def __init__(
        self,
        make_replica: Callable[[], ReplicaProcess],
        roles: Sequence[Role],
        on_death: Callable[[int], None],
    ):
        self.is_paused = False
        self._make_replica = make_replica
        self._on_death = on_death
        self._all = [Seat(make_replica(), role) for role in roles]
        self._newest = NewestWeights()
        # Held while the weights or the pause of all replicas change, and while a replica joins.
        self._changing = asyncio.Lock()
        self._news = asyncio.Event()  # set and replaced when a replica or a request has changed
        self._starts: set[asyncio.Task[None]] = set()

    def __getitem__(self, index: int) -> Seat:
        return self._all[index]

    def __iter__(self) -> Iterator[Seat]:
        return iter(self._all)

    @property
    def weights_version(self) -> int:
        """The version of the weights of all replicas that serve, after the last update."""
        return self._newest.version

    def serving(self, *, answers: bool | None = None) -> list[int]:
        """Return the indices of the serving replicas that answer, or that only prefill."""
        return [
            i
            for i, seat in enumerate(self._all)
            if seat.started is not None and answers in (None, seat.answers)
        ]

    async def news(self) -> None:
        """Wait for a change that `tell` announces; raise if no replica will answer again."""
        seats = [seat for seat in self._all if seat.answers]
        errors = [seat.error for seat in seats if seat.error is not None]
        if len(errors) == len(seats):
            raise ReplicaDiedError(
                f"no replica is left and none could be replaced: {errors[0]}; create a new fleet"
            ) from errors[0]
        await self._news.wait()

    def tell(self) -> None:
        """Wake the coroutines that wait for `news`."""
        self._news.set()
        self._news = asyncio.Event()

    async def start(self, index: int) -> Started:
        """Start the replica of a seat; after an error the fleet continues without it."""
        seat = self._all[index]
        try:
            for _ in range(_MAX_STARTS - 1):
                try:
                    return await self._start(seat)
                except ReplicaDiedError:
                    seat.give_to(self._make_replica())
            return await self._start(seat)
        except JaxserveError as error:
            seat.fail(error)
            raise
        finally:
            self.tell()

    def replace(self, index: int, dead: ReplicaProcess, error: ReplicaDiedError) -> None:
        """Start a new process instead of a dead one; do nothing if that has been done."""
        seat = self._all[index]
        if seat.replica is not dead:
            return
        _log.warning("replica %d died and is being replaced: %s", index, error)
        self._on_death(index)
        seat.replace(self._make_replica())
        start = asyncio.get_running_loop().create_task(self._start_again(index))
        self._starts.add(start)
        start.add_done_callback(self._starts.discard)

    async def update_params(self, update: FleetUpdate) -> int:
        """Switch every replica to new weights, and return their version.

        Either no replica takes them, or replicas that fail after all have loaded them are replaced
        by processes that start with them.
        """
        while True:
            while not self.serving(answers=True):
                await self.news()
            async with self._changing:
                if not self.serving(answers=True):
                    continue
                check_can_end(update.settings.running, is_paused=self.is_paused)
                update = self._newest.numbered(update)
                dead, refusal = await prepare(self._replicas, update)
                self._replace_all(dead)
                if refusal is not None:
                    raise refusal
                self._newest.add(update)
                self._replace_all(await commit(self._replicas, update))
                for index in self.serving():
                    self._all[index].take(self._newest.version)
                return self._newest.version

    async def pause(self, running: Running) -> None:
        """Run no step on any replica until `resume`, also on replicas that start meanwhile."""
        async with self._changing:
            check_can_end(running, is_paused=self.is_paused)
            self.is_paused = True
            await self._of_each(lambda replica: replica.pause(running))

    async def resume(self) -> None:
        async with self._changing:
            self.is_paused = False
            await self._of_each(lambda replica: replica.resume())

    def kill(self) -> None:
        for seat in self._all:
            seat.replica.kill()

    @property
    def _replicas(self) -> list[ReplicaProcess]:
        """The replicas that serve now."""
        return [self._all[index].replica for index in self.serving()]

    async def _start(self, seat: Seat) -> Started:
        started = await seat.replica.start()
        async with self._changing:
            await self._newest.give_to(seat.replica)
            if self.is_paused:
                await seat.replica.pause("keep")
            seat.serve(started, self._newest.version)
        return started

    async def _start_again(self, index: int) -> None:
        try:
            await self.start(index)
        except JaxserveError as error:
            _log.error("replica %d could not be replaced: %s", index, error)

    async def _of_each(self, action: Callable[[ReplicaProcess], Coroutine[Any, Any, None]]) -> None:
        """Do something on every replica that serves, and replace those that fail."""
        replicas = self._replicas
        found = await asyncio.gather(*map(action, replicas), return_exceptions=True)
        self._replace_all(
            [
                Failed(each, ReplicaDiedError(f"it could not do what all replicas do: {error}"))
                for each, error in zip(replicas, found, strict=True)
                if error is not None
            ]
        )

    def _replace_all(self, failed: Sequence[Failed]) -> None:
        for replica, error in failed:
            for index, seat in enumerate(self._all):
                if seat.replica is replica:
                    self.replace(index, replica, error)
