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

    @property
    def answers(self) -> bool:
        """Whether its replica answers requests, and not only computes prompts."""
        return self.role != "prefill"


@final
@dataclass(eq=False)
class OpenRequest:
    """A request without a completion, and the replica that works on it."""

    call: Call
    replay: StreamReplay | None = None
    index: int | None = None
    replica: Replica | None = None
    is_cancelled: bool = False
