"""The protocol between a fleet and its replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, final

from jaxserve.core.errors import JaxserveError
from jaxserve.core.request import Completion
from jaxserve.engine.answers import PieceSink
from jaxserve.engine.device_loop import Running
from jaxserve.fleet.call import Call
from jaxserve.runtime import RuntimeStats
from jaxserve.runtime.weight_update import WeightUpdate

# "whole" computes prompts and answers. "prefill" computes prompts, whose KV goes to a "decode"
# replica, which computes the answers.
Role = Literal["whole", "prefill", "decode"]


@final
@dataclass(frozen=True, kw_only=True)
class Started:
    """The facts about a replica that serves: its process, its machine, its limits in tokens.

    Attributes:
      num_host_pages: pages of host memory, through which KV goes to another replica.
    """

    pid: int
    host: str
    max_context: int
    max_length: int
    max_prompt_tokens: int
    vocab_size: int
    num_host_pages: int


@final
@dataclass(frozen=True, kw_only=True)
class ReplicaState:
    """The state of one replica.

    Attributes:
      role: see `Role`.
      started: facts about its process; None while it loads, or if it could not be replaced.
      error: reason why it could not be replaced; None otherwise.
      num_unfinished: number of its requests that have not ended.
      work: expected tokens of these requests, by the router's estimate.
      num_deaths: number of its processes that have died.
      weights_version: of the weights that it computes with; see `Fleet.update_params`.
    """

    role: Role
    started: Started | None
    error: JaxserveError | None
    num_unfinished: int
    work: int
    num_deaths: int
    weights_version: int


class Replica(Protocol):
    """A runtime in a process that may die. Its constructor does not wait for the process.

    Every coroutine raises `ReplicaDiedError` if the process has died or can no longer serve.
    """

    async def start(self) -> Started:
        """Load the model, and compile what a first request needs.

        It raises the errors of `Runtime.from_pretrained`.
        """
        ...

    async def prefill(self, call: Call) -> Any:
        """Compute a prompt, and return where the KV of its full pages is, for `answer`.

        None if there is none, as where the prompt cannot be served; then `answer` says why.
        """
        ...

    async def answer(
        self, call: Call, on_piece: PieceSink | None = None, kv: Any = None
    ) -> Completion:
        """Return the completion, which has an error if the request cannot be served.

        Args:
          on_piece: called with the pieces, from the first token on, before the completion.
          kv: what `prefill` of another replica returned, which is used up. What cannot be read is
            computed.

        Raises:
          InvalidRequestError: the prompt cannot be sent to the process.
          EngineFailedError: the request failed, but the replica still serves.
        """
        ...

    async def stats(self) -> RuntimeStats:
        """Return the counters of the process."""
        ...

    async def prepare_params(self, source: Any, *, partial: bool) -> None:
        """Check new weights, and place them beside the present ones; requests run meanwhile.

        Args:
          source: a path, or what the maker of the replica sends parameters by.
          partial: see `Runtime.update_params`.

        Raises:
          JaxserveError: the process cannot take them, and serves as before.
        """
        ...

    async def drop_prepared(self) -> None:
        """Drop the weights that `prepare_params` has placed."""
        ...

    async def update_params(self, update: WeightUpdate) -> None:
        """Compute with the weights that `prepare_params` has placed, from now on.

        Raises:
          JaxserveError: the process computes with the former ones.
        """
        ...

    async def pause(self, running: Running) -> None:
        """See `Runtime.pause`."""
        ...

    async def resume(self) -> None:
        """See `Runtime.resume`."""
        ...

    def cancel(self, request_id: str) -> None:
        """Make `answer` return a completion with the tokens so far. It neither waits nor raises."""
        ...

    def kill(self) -> None:
        """End the process if it has not ended. It does not raise."""
        ...
