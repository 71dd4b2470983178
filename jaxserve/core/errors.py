"""The errors that jaxserve raises on purpose.

A message says what was given, what is allowed, and what to do.

    JaxserveError
    ├── InvalidRequestError        only this request is refused
    │   ├── EmptyPromptError
    │   ├── PromptTooLongError         longer than the context, or than the whole page pool
    │   │   └── ConversationTooLongError   its history leaves no room for the next answer
    │   ├── TokenOutOfRangeError
    │   ├── InvalidSamplingParamsError
    │   ├── UnknownAdapterError        an adapter that is not loaded
    │   ├── InvalidGrammarError        a schema, grammar or regular expression that does not compile
    │   │   └── GrammarTooComplexError     it needs more time or memory than is allowed
    │   ├── AnswerTooShortError        its grammar ends its answer before min_tokens
    │   ├── GrammarsBusyError          too many other grammars are being compiled
    │   ├── BoundNotMetError           it is expected to take longer than a bound of its own
    │   ├── UnheededBoundError         it has a bound of its own, which the policy ignores
    │   ├── UnfoldError                the user's function raised for this input
    │   └── InvalidGraphError          a graph of cells that cannot be computed as given
    │       ├── EmptyGraphError
    │       ├── UnknownCellError           a cell that the runtime was not created with
    │       ├── MissingInputError
    │       ├── UnknownInputError
    │       ├── InputMismatchError         a value of another shape or dtype
    │       ├── CyclicGraphError
    │       └── TooManyNodesError
    ├── NumericalError             the model produced NaN or infinite logits for this request
    ├── GrammarFailedError         llguidance raised, or let an answer pass that does not validate
    ├── ModelError
    │   ├── UnknownModelError
    │   ├── UnsupportedModelError      an architecture or option that no family here implements
    │   └── CheckpointError            every problem of a checkpoint, collected
    ├── DownloadError              a file could not be fetched, or is not the published one
    ├── ModelCacheError            the model cache cannot be read or written
    ├── GpuUnusedError             an NVIDIA GPU that JAX cannot start, or leaves for the CPU
    ├── DeviceMemoryError          weights or page pool do not fit
    │   └── StepMemoryError            one step did not fit; other requests continue
    ├── InvalidConfigError         a runtime, policy or mesh setting
    │   ├── InvalidCellError           a cell's module does not fit its inputs or outputs
    │   └── InvalidParamsError         new weights that do not fit, or are not finite
    ├── InfeasibleBoundError       no schedule keeps a latency bound; names the lowest one
    ├── InvalidProfileError        step times that are unreadable, or measured on something else
    ├── MissingExtraError          an optional package is missing; names the extra to install
    ├── CompilationAfterWarmupError  strict mode: something compiled after warm-up
    ├── ProcessGroupError          processes that differ, or a call on the wrong process
    ├── ConversationError          a turn of a conversation failed
    │   ├── UnknownConversationError   never begun, deleted, or dropped by the journal's limits
    │   ├── ConversationBusyError      its last turn is still being answered
    │   ├── ConversationConflictError  changed by another process or runtime
    │   ├── OtherModelError            its tokens are of another vocabulary
    │   ├── TurnCancelledError         the answer was cut off; the turn is dropped
    │   │   └── TurnTimeoutError
    │   └── JournalError               the journal cannot be read or written
    │       ├── JournalLockedError         locked by another process
    │       └── JournalVersionError        written by a newer jaxserve
    ├── QueueFullError             the maximum number of requests is waiting
    ├── EngineBusyError            requests run for longer than a call may wait for their end
    ├── StaleWeightsError          its first tokens are of weights that are too old
    ├── EngineFailedError          the device or the loop failed; all running requests end with it
    ├── RegroupError               devices did not move to another group; all serve as before
    ├── HandoverError              KV was lost several times on its way between device groups
    ├── ReplicaDiedError           two replicas of a fleet died under a request, or none is left
    └── RuntimeClosedError
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping, Sequence
from typing import Any


class JaxserveError(Exception):
    """The base of the errors that jaxserve raises on purpose. Pickling keeps attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        state = {**vars(self), "args": self.args}
        return copyreg.__newobj__, (type(self),), state  # pyrefly: ignore[missing-attribute]


class InvalidRequestError(JaxserveError, ValueError):
    """A request that cannot be served as given; other requests are not affected."""


class OtherTaskError(InvalidRequestError):
    """A call that this model does not serve, such as `generate` of a classifier."""


class EmptyPromptError(InvalidRequestError):
    """A prompt without tokens."""


class PromptTooLongError(InvalidRequestError):
    """A prompt that leaves no room for one output token, in the context or in the page pool.

    A running request ends with this error if the pool becomes too small for its prompt and output.
    """


class ConversationTooLongError(PromptTooLongError):
    """A conversation whose next prompt leaves no room for an answer.

    Attributes:
      num_history_tokens: tokens of the earlier turns.
      num_new_tokens: tokens that the new messages add.
      max_prompt_tokens: maximum number of prompt tokens, see `EngineConfig`.
    """

    def __init__(
        self, id: str, num_history_tokens: int, num_new_tokens: int, max_prompt_tokens: int
    ):
        self.num_history_tokens = num_history_tokens
        self.num_new_tokens = num_new_tokens
        self.max_prompt_tokens = max_prompt_tokens
        room = max(0, max_prompt_tokens - num_history_tokens)
        super().__init__(
            f"conversation {id!r} has {num_history_tokens} tokens of history, and this turn adds "
            f"{num_new_tokens}. This runtime's context and page pool allow {max_prompt_tokens}, "
            f"which leaves {room} for a turn. Send less, continue from an earlier turn "
            "(fork(num_turns)), begin a new conversation, or raise max_context or kv_memory"
        )


class TokenOutOfRangeError(InvalidRequestError):
    """A token id outside the model's vocabulary."""


class InvalidSamplingParamsError(InvalidRequestError):
    """Sampling parameters that are out of range or contradict each other."""


class UnknownAdapterError(InvalidRequestError):
    """The name of an adapter that is not loaded."""


class InvalidGrammarError(InvalidRequestError):
    """A JSON schema, regular expression or grammar that cannot be compiled."""


class GrammarTooComplexError(InvalidGrammarError):
    """A grammar that needs more time or memory than is allowed, at its compilation or later."""


class AnswerTooShortError(InvalidRequestError):
    """A grammar whose answer must end before `min_tokens`."""


class GrammarsBusyError(InvalidRequestError):
    """A request whose grammar is not compiled, because too many others are being compiled."""


class BoundNotMetError(InvalidRequestError):
    """A request that is expected to miss a latency bound of its own.

    Attributes:
      name: the bound's name in `SamplingParams`.
      bound_s: the bound.
      expected_s: expected seconds: to the end, to the first token, or per token.
      wait_s: the part of the seconds from submission that is spent in the queue.
    """

    def __init__(
        self, id: str, name: str, bound_s: float, expected_s: float, tokens: float, wait_s: float
    ):
        self.name, self.bound_s, self.expected_s, self.wait_s = name, bound_s, expected_s, wait_s
        of, remedy = {
            "latency_bound": (f"{tokens:.0f} tokens are", "a lower max_tokens"),
            "first_token_bound": ("its first token is", "a shorter prompt"),
            "token_bound": ("a token is", "fewer slots (max_slots)"),
        }[name]
        queue = "" if name == "token_bound" else f", of which {wait_s:.4g} s in the queue"
        super().__init__(
            f"request {id}: {name}={bound_s:.4g} s, and {of} expected to take "
            f"{expected_s:.4g} s{queue}. Pass a longer {name} or {remedy}, or submit it when less "
            "is running"
        )


class UnheededBoundError(InvalidRequestError):
    """A request with a latency bound of its own, under a policy that ignores such bounds."""


class UnfoldError(InvalidRequestError):
    """An input for which the function that unfolds it raised; the cause is `__cause__`."""


class InvalidGraphError(InvalidRequestError):
    """A graph of cells that cannot be computed as given."""


class EmptyGraphError(InvalidGraphError):
    """A graph without nodes."""


class UnknownCellError(InvalidGraphError):
    """A node of a cell that the runtime was not created with."""


class MissingInputError(InvalidGraphError):
    """A node without one of its cell's inputs."""


class UnknownInputError(InvalidGraphError):
    """An input, or an output, that a node's cell does not have."""


class InputMismatchError(InvalidGraphError):
    """An input of a node whose shape or dtype is not the cell's."""


class CyclicGraphError(InvalidGraphError):
    """Nodes that depend on themselves."""


class TooManyNodesError(InvalidGraphError):
    """A graph with more nodes, or more live values, than the runtime accepts."""


class NumericalError(JaxserveError, ArithmeticError):
    """A request for which a model's logits, or a cell's outputs, were not finite."""


class GrammarFailedError(JaxserveError):
    """A request that llguidance failed: its masks, or an answer that does not validate."""


class ModelError(JaxserveError):
    """A model that cannot be found or loaded."""


class UnknownModelError(ModelError):
    """A model name that is neither registered nor a folder or GGUF file."""


class UnsupportedModelError(ModelError):
    """An architecture, or an option of one, that no model family implements."""


class CheckpointError(ModelError):
    """A checkpoint whose tensors do not match its configuration.

    Attributes:
      problems: every tensor that is missing, surplus, unreadable or of a wrong shape.
    """

    def __init__(self, where: str, problems: Sequence[str], remedy: str):
        self.problems = tuple(problems)
        listed = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(
            f"checkpoint {where} has {len(self.problems)} problem(s):\n{listed}\n{remedy}"
        )


class DownloadError(JaxserveError):
    """A file that pip could not fetch, or that differs from the published one."""


class ModelCacheError(JaxserveError, OSError):
    """A model cache that cannot be read or written."""


class GpuUnusedError(JaxserveError, RuntimeError):
    """An NVIDIA GPU that JAX cannot use, or does not, although the CPU was not asked for."""


class DeviceMemoryError(JaxserveError, MemoryError):
    """Weights, step temporaries and page pool that do not fit in the device's memory."""


class StepMemoryError(DeviceMemoryError):
    """A step that did not fit in the device's memory; only its own requests fail."""


class HostMemoryError(DeviceMemoryError):
    """Host pages that did not fit in the host's memory; the engine continues without them."""


class InvalidConfigError(JaxserveError, ValueError):
    """A runtime, policy or mesh setting that is out of range or unknown."""


class InvalidCellError(InvalidConfigError):
    """A cell whose module does not fit its inputs or outputs, or whose sizes are not allowed."""


class InvalidParamsError(InvalidConfigError):
    """New weights that do not fit or are not finite; the present ones stay in use."""


class InfeasibleBoundError(JaxserveError, ValueError):
    """Latency bounds that no schedule keeps.

    Attributes:
      bounds: seconds by name of the bound.
      lowest: the lowest seconds that a schedule reaches, by the same names, for each bound alone.
    """

    def __init__(self, bounds: Mapping[str, float], lowest: Mapping[str, float]):
        self.bounds = dict(bounds)
        self.lowest = dict(lowest)
        given = ", ".join(f"{name}={bound_s:.4g}" for name, bound_s in self.bounds.items())
        reached = ", ".join(f"{name}={lowest_s:.4g}" for name, lowest_s in self.lowest.items())
        super().__init__(
            f"no schedule keeps {given}. The lowest that some schedule reaches, each for itself: "
            f"{reached}. Pass longer bounds, more devices, or shorter outputs"
        )


class QueueFullError(JaxserveError):
    """A call with more requests than may wait. None was accepted; retry the call later."""


class StaleWeightsError(JaxserveError):
    """A request with tokens of older weights than an update allowed (`max_staleness`)."""


class EngineBusyError(JaxserveError, TimeoutError):
    """Requests that run longer than a call may wait for their end."""


class InvalidProfileError(JaxserveError, ValueError):
    """Measured step times that are unreadable or of another model, device or configuration."""


class MissingExtraError(JaxserveError, ImportError):
    """An optional package that is not installed."""

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed; "
            f"install it in a checkout of jaxserve with: pip install -e '.[{extra}]'"
        )


class CompilationAfterWarmupError(JaxserveError):
    """A compilation after warm-up, in strict mode."""


class ProcessGroupError(JaxserveError):
    """Processes whose settings differ, or a call that another process must make."""


class ConversationError(JaxserveError):
    """A turn that failed; the conversation is unchanged."""


class UnknownConversationError(ConversationError, KeyError):
    """A conversation id that is unknown: never begun, deleted, or dropped by journal limits."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class ConversationBusyError(ConversationError):
    """A conversation whose last turn is still being answered; turns cannot overlap."""


class ConversationConflictError(ConversationError):
    """A conversation that another process or runtime has changed since it was read."""


class OtherModelError(ConversationError, ValueError):
    """A conversation with tokens of another vocabulary, or with another chat template."""


class TurnCancelledError(ConversationError):
    """An answer that was cut off by `cancel` or by the close of the runtime."""


class TurnTimeoutError(TurnCancelledError, TimeoutError):
    """An answer that was not complete within its timeout."""

    def __init__(self, id: str, timeout_s: float | None, num_tokens: int):
        super().__init__(
            f"conversation {id!r} has no answer after {timeout_s} s, only {num_tokens} tokens of "
            "it. The conversation is unchanged; pass a longer timeout_s or a lower max_tokens"
        )


class JournalError(ConversationError, OSError):
    """A journal of conversations that cannot be read or written."""


class JournalLockedError(JournalError):
    """A journal that another process kept locked beyond the waiting time."""


class JournalVersionError(JournalError):
    """A journal that a newer version of jaxserve wrote."""


class EngineFailedError(JaxserveError):
    """The device or the engine's loop failed; every running request ends with this error."""


class RegroupError(JaxserveError):
    """A move of devices between two groups that failed; the groups serve as before."""


class HandoverError(JaxserveError):
    """A request whose KV did not arrive at the other device group, several times in a row."""


class ReplicaDiedError(JaxserveError):
    """A replica's process died, and the answers that it was computing are lost."""


class RuntimeClosedError(JaxserveError):
    """The runtime is closed, and its device memory is freed."""


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C ended a call that waited for answers. All of its requests have ended.

    Attributes:
      completions: those of all requests, in order; of requests that had not ended with the tokens
        so far, and `finish_reason` "cancelled".
    """

    def __init__(self, completions: list[Any]):
        super().__init__("interrupted; .completions has what was answered")
        self.completions = completions


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error says that memory could not be allocated, by XLA or by jaxserve.

    XLA has no type for that. Its error of a kernel that needs more shared memory than a block has
    begins alike, and is not one.
    """
    if isinstance(error, DeviceMemoryError):
        return True
    text = str(error)
    return "CUDA_ERROR_OUT_OF_MEMORY" in text or (
        "RESOURCE_EXHAUSTED" in text and "Shared memory size limit exceeded" not in text
    )
