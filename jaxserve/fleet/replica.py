"""The protocol between a fleet and its replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

from jaxserve.core.errors import JaxserveError
from jaxserve.core.request import Completion
from jaxserve.engine.answers import PieceSink
from jaxserve.fleet.call import Call
from jaxserve.runtime import RuntimeStats


@final
@dataclass(frozen=True, kw_only=True)
class Started:
    """A replica that serves: its process, the machine it is on, and its limits in tokens."""

    pid: int
    host: str
    max_context: int
    max_prompt_tokens: int
    vocab_size: int


@final
@dataclass(frozen=True, kw_only=True)
class ReplicaState:
    """The state of one replica.

    Attributes:
      started: None while it is loading, or when it could not be replaced.
      error: why it could not be replaced.
      num_unfinished: requests that it works on.
      work: tokens that these may still take, by the router's estimate.
      num_deaths: processes of this replica that have died.
    """

    started: Started | None
    error: JaxserveError | None
    num_unfinished: int
    work: int
    num_deaths: int


class Replica(Protocol):
    """A runtime in a process that may die. Its constructor does not wait for the process.

    Every coroutine raises `ReplicaDiedError` when the process is gone or cannot serve any more.
    """

    async def start(self) -> Started:
        """Load the model and compile. Raises what `Runtime.from_pretrained` raises."""
        ...

    async def answer(self, call: Call, on_piece: PieceSink | None = None) -> Completion:
        """Return the completion; a failed one for a request that cannot be served.

        Args:
          on_piece: gets the pieces before, from the first token on.

        Raises:
          InvalidRequestError: the prompt cannot be sent to the process.
          EngineFailedError: a fault that the replica survives.
        """
        ...

    async def stats(self) -> RuntimeStats:
        """Return the counters of the process."""
        ...

    def cancel(self, request_id: str) -> None:
        """Let `answer` return the completion as it stands. Does not wait, and never fails."""
        ...

    def kill(self) -> None:
        """End the process, if it has not ended. Never fails."""
        ...
