"""The base class of `Runtime` and `Fleet`, which answers prompts."""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Any, ClassVar, Self, overload

from jaxserve.conversations import Conversation, Conversations
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece, PieceSink
from jaxserve.engine.pending import Params, Pending, PromptBatch, aread, read, submitted
from jaxserve.engine.requests import Prompt
from jaxserve.models.config import DecoderConfig
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.runtime.stats import RuntimeStats


class Service(abc.ABC):
    """A service that answers prompts with one model, in this process or, as `Fleet`, in several.

    It is thread-safe. Use it as a context manager, or `close` it.

    A prompt is a text (tokenized unchanged), a list of token ids, or a list of chat messages
    (rendered with the model's chat template).

    Calls that wait for answers raise InvalidRequestError on the service's own threads, on which
    `on_piece` and the callbacks of futures run. All calls raise RuntimeClosedError after `close`,
    and calls that need an engine raise EngineFailedError after it has failed.

    Attributes:
      recovers: whether requests are served after an EngineFailedError, as by other replicas.
      model_config: the model's configuration, which says whether it generates, embeds or
        classifies.
    """

    recovers: ClassVar[bool]
    options: RuntimeOptions
    model_config: DecoderConfig

    @property
    @abc.abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None restricts prompts and completions to token ids."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; token ids are below it."""
        return self.model_config.vocab_size

    @property
    @abc.abstractmethod
    def max_length(self) -> int:
        """Maximum number of tokens of a prompt and its answer together."""

    @property
    @abc.abstractmethod
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters, which `SamplingParams.adapter` may have."""

    @abc.abstractmethod
    def load_adapter(self, name: str, source: Any, *, scale: float | None = None) -> None:
        """Load an adapter, as `Runtime.load_adapter` does."""

    @abc.abstractmethod
    def drop_adapter(self, name: str) -> None:
        """Drop an adapter, as `Runtime.drop_adapter` does."""

    @property
    @abc.abstractmethod
    def conversations(self) -> Conversations:
        """The stored conversations, to list and delete them; `conversation` opens one."""

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

        Args:
          params: parameters for all prompts, or one for each; greedy and 256 tokens by default.
          progress: show a bar when it takes over two seconds; `options.progress` by default.

        Returns:
          One completion for one prompt; a list in the order of the prompts for a batch.

        Raises:
          InvalidRequestError: a single prompt cannot be served; one of its subclasses.
          InvalidConfigError: the numbers of parameters and of prompts differ.
          QueueFullError: more requests than `max_waiting` would wait.
          GenerationInterrupted: Ctrl-C, a KeyboardInterrupt; the requests were cancelled, and its
            `completions` have the tokens so far.
        """
        self._check_may_wait()
        batch = PromptBatch.of(prompts, params)
        show = self.options.progress if progress is None else progress
        return batch.wait(self._submit_batch(batch), progress=show)

    async def agenerate(self, prompts: Any, params: Params = None) -> Any:
        """`generate` for asyncio. Cancelling the task cancels its requests."""
        self._check_may_wait()
        batch = PromptBatch.of(prompts, params)
        pending = await submitted(lambda: self._submit_batch(batch), batch.params)
        return await batch.await_(pending)

    @abc.abstractmethod
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
    ) -> Pending[Completion]:
        """Submit one request, and return at once, or when its grammar is compiled.

        Args:
          request_id: unique among running requests; generated by default.
          priority: under a priority order, a request with a higher value runs first; a whole number
            of -(2**31 - 1) to 2**31 - 1.
          deadline_s: seconds from now; under a priority order, it breaks ties of priority.
          conversation_id: id for reports and recordings if the caller keeps the history;
            `conversation` opens one that the service keeps.
          on_piece: called with the pieces that `stream` yields, on a thread of the service; it must
            not wait.

        Raises:
          InvalidRequestError: the request cannot be served; one of its subclasses. A `Fleet` raises
            it only for the id and the deadline, and returns a completion with the error for all
            other reasons.
          QueueFullError: more requests than `max_waiting` would wait.
        """

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Piece]:
        """Yield the pieces of a completion. Closing the generator early cancels the request.

        Raises:
          JaxserveError: the request fails, as in `generate`; raised after the last piece if it had
            begun.
        """
        self._check_may_wait()
        params = params or SamplingParams()
        return read(lambda sink: self.submit(prompt, params, on_piece=sink), params.n)

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[Piece]:
        """`stream` for asyncio."""
        params = params or SamplingParams()
        return aread(lambda sink: self.submit(prompt, params, on_piece=sink), params)

    @abc.abstractmethod
    def cancel(self, request_id: str) -> None:
        """End a request with the tokens so far; do nothing if it has ended or is unknown."""

    def conversation(
        self,
        id: str | None = None,
        *,
        system: str | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> Conversation:
        """Start or continue a conversation, whose `send` and `stream` answer with its history.

        Conversations are kept in memory. With the option `conversations` they are also kept in a
        journal, which remains after the process ends.

        Args:
          id: id of the conversation; a known id continues it. Generated by default.
          system: the system message of a new conversation.
          messages: the first messages of a new conversation, after `system`; for instance the
            `history` of another conversation.

        Raises:
          InvalidConfigError: `id` is not valid, or a conversation with this id began with other
            messages.
          InvalidRequestError: `messages` are not chat messages.
          OtherModelError: a conversation with this id was tokenized for another model.
          JournalError: the journal cannot be used.
        """
        return self.conversations.open(id, system=system, messages=messages)

    @abc.abstractmethod
    def is_ready(self) -> bool:
        """Return, without waiting, whether a first request would wait for no compilation.

        Earlier requests are accepted, and wait. Executables for later needs, such as many requests
        at once, may still be compiling (`RuntimeOptions.warmup`).
        """

    @abc.abstractmethod
    def stats(self, *, wait: bool = True) -> RuntimeStats:
        """Return a snapshot of the counters.

        A `Fleet` has counters only while a replica serves; otherwise the call waits for one. It
        raises ReplicaDiedError if none will serve again, or if none serves now and `wait` is False.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Cancel every request that has not ended, and free devices, threads and files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def _check_may_wait(self) -> None:
        """Raise InvalidRequestError on the service's own threads."""

    @abc.abstractmethod
    def _submit_batch(self, batch: PromptBatch) -> list[Pending[Completion]]:
        """Submit every prompt; those that cannot be served get an ended request with the error."""
