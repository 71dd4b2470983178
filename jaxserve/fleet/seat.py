"""The state that a dispatcher keeps of its replicas and requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxserve.core.errors import JaxserveError
from jaxserve.fleet.call import Call
from jaxserve.fleet.replica import Replica, Role, Started
from jaxserve.fleet.stream_replay import StreamReplay


@final
@dataclass(eq=False)
class Seat:
    """The place of one replica in the fleet; a new process takes it when its process dies."""

    replica: Replica
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
        """Take note that the replica serves from now on."""
        self.started = started
        self.weights_version = weights_version

    def take(self, weights_version: int) -> None:
        """Take note that the replica computes with other weights."""
        self.weights_version = weights_version

    def give_to(self, replica: Replica) -> None:
        """Take another replica, because the one before died as it started."""
        self.replica.kill()
        self.replica = replica

    def replace(self, replica: Replica) -> None:
        """Take another replica, because the one that served has died."""
        self.give_to(replica)
        self.started = None
        self.num_deaths += 1
        self.num_unfinished = 0

    def fail(self, error: JaxserveError) -> None:
        """Go on without a replica."""
        self.replica.kill()
        self.error = error


@final
@dataclass(frozen=True, eq=False)
class Reservation:
    """The replica that is to answer a request, with the work that is counted for it.

    Attributes:
      index: of the seat.
      work: tokens.
      num_cached: leading pages of the prompt that it probably has.
    """

    index: int
    seat: Seat
    replica: Replica
    work: int
    num_cached: int

    @property
    def holds(self) -> bool:
        """Whether the replica has not died."""
        return self.seat.replica is self.replica


@final
@dataclass(eq=False)
class OpenRequest:
    """A request without a completion, and the replica that works on it."""

    call: Call
    replay: StreamReplay | None = None
    index: int | None = None
    replica: Replica | None = None
    is_cancelled: bool = False

    def enter(self, index: int, seat: Seat) -> Replica:
        """Have the replica of a seat, the one with this index, work on the request."""
        seat.num_unfinished += 1
        self.index, self.replica = index, seat.replica
        return seat.replica

    def leave(self, seat: Seat, replica: Replica) -> bool:
        """Have no replica work on the request; return whether `replica` still has the seat."""
        self.replica = None
        if seat.replica is not replica:
            return False
        seat.num_unfinished -= 1
        return True

    def cancel(self) -> None:
        """Have the replica that works on the request end it, if there is one."""
        self.is_cancelled = True
        if self.replica is not None:
            self.replica.cancel(self.call.id)
