"""The seats of a fleet: starts of replicas, deaths, and what all replicas have in common."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, final

from jaxserve.core.errors import JaxserveError, ReplicaDiedError
from jaxserve.engine.device_loop import Running
from jaxserve.fleet.replica import Replica, Role, Started
from jaxserve.fleet.seat import Seat
from jaxserve.fleet.weights import (
    Failed,
    FleetUpdate,
    NewestWeights,
    check_can_end,
    commit,
    prepare,
)

_log = logging.getLogger(__name__)

# Number of processes of one replica that may die in a row before they serve.
_MAX_STARTS = 3


@final
class Seats:
    """The seats of a fleet. A replica that dies is replaced by a new process, with its weights.

    Its coroutines, and all state, belong to the thread of one asyncio loop.

    Args:
      make_replica: returns a new replica; it must not wait.
      roles: of each seat.
      on_death: called with the index of a seat whose replica has died.

    Attributes:
      is_paused: whether `pause` was called, and `resume` was not.
    """

    def __init__(
        self,
        make_replica: Callable[[], Replica],
        roles: Sequence[Role],
        on_death: Callable[[int], None],
    ):
        self.is_paused = False
        self._make_replica = make_replica
        self._on_death = on_death
        self._all = [Seat(make_replica(), role) for role in roles]
        self._newest = NewestWeights()
        # Held while weights or pauses of all replicas change, and while one joins the others.
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
        """Return the indices of the replicas that serve now.

        Args:
          answers: True for those that answer, False for those that only prefill.
        """
        return [
            i
            for i, seat in enumerate(self._all)
            if seat.started is not None and answers in (None, seat.answers)
        ]

    async def news(self) -> None:
        """Wait for a change that `tell` announces.

        Raises:
          ReplicaDiedError: no replica will answer again.
        """
        seats = [seat for seat in self._all if seat.answers]
        errors = [seat.error for seat in seats if seat.error is not None]
        if len(errors) == len(seats):
            raise ReplicaDiedError(
                f"no replica is left and none could be replaced: {errors[0]}; create a new fleet"
            ) from errors[0]
        await self._news.wait()

    def tell(self) -> None:
        """Wake those that wait for `news`."""
        self._news.set()
        self._news = asyncio.Event()

    async def start(self, index: int) -> Started:
        """Start the replica of a seat; it serves when this returns.

        Raises:
          JaxserveError: what prevents it; the fleet goes on without the replica.
        """
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

    def replace(self, index: int, dead: Replica, error: ReplicaDiedError) -> None:
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
        """Have every replica compute with new weights, and return their version.

        Either no replica takes them, or those that fail after all others have placed them are
        replaced by processes that start with them.

        Raises:
          JaxserveError: a replica cannot take them, so none does.
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
        """Have every replica run no step until `resume`; those that start join in.

        Raises:
          EngineBusyError: running="finish" in a pause.
        """
        async with self._changing:
            check_can_end(running, is_paused=self.is_paused)
            self.is_paused = True
            await self._of_each(lambda replica: replica.pause(running))

    async def resume(self) -> None:
        """Have every replica run steps again."""
        async with self._changing:
            self.is_paused = False
            await self._of_each(lambda replica: replica.resume())

    def kill(self) -> None:
        """End every process."""
        for seat in self._all:
            seat.replica.kill()

    @property
    def _replicas(self) -> list[Replica]:
        """Those that serve now."""
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

    async def _of_each(self, action: Callable[[Replica], Coroutine[Any, Any, None]]) -> None:
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
