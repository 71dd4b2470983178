"""The protocol that everything which answers prompts shares: `Runtime` and `Fleet`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Any, Protocol, Self, overload

from jaxserve.conversations import Conversation, Conversations
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece, PieceSink
from jaxserve.engine.requests import Prompt
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.runtime.pending import Params, Pending
from jaxserve.runtime.stats import RuntimeStats


class Service(Protocol):
    """Answers prompts with one model: in this process (`Runtime`) or in several (`Fleet`).

    Thread-safe. Use it as a context manager, or `close` it.

    A prompt is a text (tokenized as it is), a list of token ids, or a list of chat messages (put
    through the model's chat template).

    Calls that wait for answers raise InvalidRequestError on the service's own threads, on which
    `on_piece` and the callbacks of futures run. All calls raise RuntimeClosedError after `close`.
    """

    @property
    def options(self) -> RuntimeOptions: ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's; None restricts prompts and completions to token ids."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def conversations(self) -> Conversations:
        """The conversations that are kept, to list and delete them; `conversation` opens one."""
        ...

    @overload
    def generate(
        self, prompts: str, params: Params = None, *, progress: bool | None = None
    ) -> Completion: ...

    @overload
    def generate(
        self, prompts: Any, params: Params = None, *, progress: bool | None = None
    ) -> Any: ...

    def generate(self, prompts: Any, params: Params = None, *, progress: bool | None = None) -> Any:
        """Answer one prompt, or a batch of prompts.

        In a batch, a request that fails is a `Completion` with its `error`; the other requests are
        not affected. The error of a single prompt is raised.

        Ctrl-C returns the completions as they stand: requests that had not ended have the
        `finish_reason` "cancelled".

        Args:
          params: for all prompts, or one for each; greedy and 256 tokens by default.
          progress: show a bar when it takes over two seconds; `options.progress` by default.

        Returns:
          One completion for one prompt; a list in the order of the prompts for a batch.

        Raises:
          InvalidRequestError: one of its subclasses, for a single prompt.
          InvalidConfigError: the numbers of parameters and of prompts differ.
          EngineFailedError
        """
        ...

    async def agenerate(self, prompts: Any, params: Params = None) -> Any:
        """`generate` for asyncio. Cancelling the task cancels its requests."""
        ...

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        conversation_id: str | None = None,
        on_piece: PieceSink | None = None,
    ) -> Pending:
        """Submit one request, and return at once.

        Args:
          request_id: unique among running requests; made up by default.
          priority: under a priority order, higher goes first.
          deadline_s: seconds from now; under a priority order, breaks ties of priority.
          conversation_id: for reports and recordings, where you keep the history yourself; see
            `conversation`.
          on_piece: gets the pieces that `stream` yields, on a thread of the service, which must
            not wait.

        Raises:
          InvalidRequestError: one of its subclasses. A `Fleet` raises it for the id alone, and
            returns a completion with the error for whatever a replica finds wrong.
          EngineFailedError
        """
        ...

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Piece]:
        """Yield a completion piece by piece. Closing the generator early cancels the request.

        Raises:
          JaxserveError: what `generate` raises; after the last piece where the request had begun.
        """
        ...

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[Piece]:
        """`stream` for asyncio."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request as it stands; does nothing if it has ended or the id is unknown."""
        ...

    def conversation(
        self,
        id: str | None = None,
        *,
        system: str | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> Conversation:
        """Begin a conversation, or continue one, whose `send` and `stream` answer and remember.

        Conversations are kept in memory, and with the option `conversations` in a journal that
        outlives the process.

        Args:
          id: of the conversation; a known id continues that conversation. Made up by default.
          system: the system message of a new conversation.
          messages: that a new conversation begins with, after `system`; for instance the `history`
            of another one.

        Raises:
          InvalidConfigError: not a valid id, or a conversation with this id began with other
            messages.
          InvalidRequestError: `messages` are not chat messages.
          OtherModelError: the conversation with this id is in the tokens of another model.
          JournalError
        """
        ...

    def stats(self) -> RuntimeStats:
        """Return a snapshot of the counters."""
        ...

    def close(self) -> None:
        """Cancel every request that has not ended, and free devices, threads and files."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
