"""What a fleet asks of a replica, wherever it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

from jaxserve.core.request import Completion
from jaxserve.engine.answers import PieceSink
from jaxserve.fleet.call import Call


@final
@dataclass(frozen=True, kw_only=True)
class Started:
    """A replica that serves: its process, the machine it is on, and its limits in tokens."""

    pid: int
    host: str
    max_context: int
    max_prompt_tokens: int
    vocab_size: int


class Replica(Protocol):
    """A runtime in a process that may die; made without waiting for it.

    Every coroutine raises `ReplicaDiedError` when the process is gone, or is of no more use.
    """

    async def start(self) -> Started:
        """Load and compile. Raises what `Runtime.from_pretrained` raises."""
        ...

    async def answer(self, call: Call, show: PieceSink | None = None) -> Completion:
        """The completion, a failed one for a request that cannot be served.

        Args:
          show: gets the pieces before, from the first token on.

        Raises:
          InvalidRequestError: the prompt cannot even be sent.
          EngineFailedError: a fault of the replica that it survives.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Let `answer` return what there is; does not wait, and never fails."""
        ...

    def kill(self) -> None:
        """End the process, if it has not ended; never fails."""
        ...
