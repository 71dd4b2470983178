"""Every error that jaxserve raises on purpose.

A message says what was given, what is allowed, and what to do.

    JaxserveError
    ├── InvalidRequestError        this request alone is refused
    │   ├── EmptyPromptError
    │   ├── PromptTooLongError         longer than the context, or than the whole page pool
    │   │   └── ConversationTooLongError   its history leaves no room for the next answer
    │   ├── TokenOutOfRangeError
    │   └── InvalidSamplingParamsError
    ├── NumericalError             the model produced NaN or infinite logits for this request
    ├── ModelError
    │   ├── UnknownModelError
    │   ├── UnsupportedModelError      an architecture or option that no family here implements
    │   └── CheckpointError            every problem of a checkpoint, collected
    ├── DownloadError              a file could not be fetched, or is not the published one
    ├── ModelCacheError            the model cache cannot be written (disk full, read-only)
    ├── DeviceMemoryError          weights or page pool do not fit
    ├── InvalidConfigError         a runtime, policy or mesh setting
    ├── InvalidProfileError        step times measured on something else, or unreadable
    ├── MissingExtraError          an optional package; names the extra to install
    ├── CompilationAfterWarmupError  strict mode: something compiled after warm-up
    ├── ProcessGroupError          several processes that do not fit, or the wrong one was asked
    ├── ConversationError          a turn of a conversation that did not come about
    │   ├── UnknownConversationError   never begun, deleted, or dropped by the journal's limits
    │   ├── ConversationBusyError      its last turn is still being answered
    │   ├── ConversationConflictError  another process, or runtime, has changed it meanwhile
    │   ├── OtherModelError            its tokens are another vocabulary's
    │   ├── TurnCancelledError         the answer was cut off; the turn is forgotten
    │   │   └── TurnTimeoutError
    │   └── JournalError               the journal cannot be read or written
    │       ├── JournalLockedError         by another process
    │       └── JournalVersionError        written by a newer jaxserve
    ├── EngineFailedError          the device or the loop failed; ends whatever was running
    ├── ReplicaDiedError           a fleet's replicas died under a request, twice; or none is left
    └── RuntimeClosedError
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class JaxserveError(Exception):
    """Base of every error that jaxserve raises on purpose."""


class InvalidRequestError(JaxserveError, ValueError):
    """A request that cannot be served as given; its neighbours are unaffected."""


class EmptyPromptError(InvalidRequestError):
    """A prompt without a single token."""


class PromptTooLongError(InvalidRequestError):
    """A prompt that leaves no room for one output token, in the context or in the page pool.

    Also of a running request, together with its answer so far, when the pool is made too small.
    """


class ConversationTooLongError(PromptTooLongError):
    """A conversation whose next prompt leaves no room for an answer.

    Attributes:
      num_history_tokens: of the turns before.
      num_new_tokens: that the new messages come to.
      max_prompt_tokens: that leave room for one output token.
    """

    def __init__(
        self, id: str, num_history_tokens: int, num_new_tokens: int, max_prompt_tokens: int
    ):
        self.id = id
        self.num_history_tokens = num_history_tokens
        self.num_new_tokens = num_new_tokens
        self.max_prompt_tokens = max_prompt_tokens
        room = max(0, max_prompt_tokens - num_history_tokens)
        super().__init__(
            f"conversation {id!r} has {num_history_tokens} tokens of history and this turn adds "
            f"{num_new_tokens}; at most {max_prompt_tokens} leave room for an answer in this "
            f"runtime's context and page pool, so {room} are left for a turn. Say less, go on from "
            "an earlier turn (fork(num_turns)), begin a new conversation, or raise max_context or "
            "kv_memory"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        counts = (self.num_history_tokens, self.num_new_tokens, self.max_prompt_tokens)
        return type(self), (self.id, *counts)


class TokenOutOfRangeError(InvalidRequestError):
    """A token id outside the model's vocabulary."""


class InvalidSamplingParamsError(InvalidRequestError):
    """Sampling parameters out of range, or that contradict each other."""


class NumericalError(JaxserveError, ArithmeticError):
    """The model's logits for this request were not finite."""


class ModelError(JaxserveError):
    """A model that cannot be found, understood or read."""


class UnknownModelError(ModelError):
    """A model name that is neither registered nor a folder or GGUF file."""


class UnsupportedModelError(ModelError):
    """An architecture, or an option of one, that no model family here implements."""


class CheckpointError(ModelError):
    """A checkpoint that does not hold what its configuration promises.

    `problems` lists every missing, surplus, misshapen or unreadable tensor, not just the first.
    """

    def __init__(self, where: str, problems: Sequence[str], remedy: str):
        self.where = where
        self.problems = tuple(problems)
        self.remedy = remedy
        listed = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(
            f"checkpoint {where} has {len(self.problems)} problem(s):\n{listed}\n{remedy}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.where, self.problems, self.remedy)


class DownloadError(JaxserveError):
    """A file that pip could not fetch, or that is not the one that was published."""


class ModelCacheError(JaxserveError, OSError):
    """The model cache cannot be written or read."""


class DeviceMemoryError(JaxserveError, MemoryError):
    """Weights, step temporaries and page pool do not fit in the device's memory."""


class InvalidConfigError(JaxserveError, ValueError):
    """A runtime, policy or mesh setting that is out of range or unknown."""


class InvalidProfileError(JaxserveError, ValueError):
    """Measured step times that cannot be read, or belong to another model, device or config."""


class MissingExtraError(JaxserveError, ImportError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed; "
            f"install it with: pip install 'jaxserve[{extra}]'"
        )
        self.package = package
        self.extra = extra
        self.purpose = purpose

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.package, self.extra, self.purpose)


class CompilationAfterWarmupError(JaxserveError):
    """Strict mode only: an executable was compiled while serving."""


class ProcessGroupError(JaxserveError):
    """Processes that did not come together, or a call that another of them would have to get."""


class ConversationError(JaxserveError):
    """A turn that did not come about; the conversation is as it was before."""


class UnknownConversationError(ConversationError, KeyError):
    """No conversation of this id: never begun, deleted, or dropped by the journal's limits."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class ConversationBusyError(ConversationError):
    """A conversation whose last turn is still being answered: turns come one after the other."""


class ConversationConflictError(ConversationError):
    """A conversation that another process, or another runtime, has changed in the meantime."""


class OtherModelError(ConversationError, ValueError):
    """A conversation in the tokens of another vocabulary, or made with another chat template."""


class TurnCancelledError(ConversationError):
    """An answer that was cut off, by `cancel` or by closing the runtime."""


class TurnTimeoutError(TurnCancelledError, TimeoutError):
    """An answer that did not come in time."""

    def __init__(self, id: str, timeout_s: float | None, num_tokens: int):
        super().__init__(
            f"conversation {id!r} had no answer after {timeout_s} s, only {num_tokens} tokens of "
            "one; it is as it was before this turn. Give a longer timeout_s, or a lower max_tokens"
        )


class JournalError(ConversationError, OSError):
    """A journal of conversations that cannot be read or written: disk full, read-only, damaged."""


class JournalLockedError(JournalError):
    """Another process holds the journal, longer than one waits."""


class JournalVersionError(JournalError):
    """A journal that a newer jaxserve has written."""


class EngineFailedError(JaxserveError):
    """The device or the engine's loop failed; every running request ended with this."""


class ReplicaDiedError(JaxserveError):
    """A replica's process is gone, and so is whatever it was answering."""


class RuntimeClosedError(JaxserveError):
    """The runtime was closed; its device memory is gone."""
