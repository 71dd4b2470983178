"""The requests that enter the engine and the completions that leave it."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, final

from jaxserve.core.errors import InvalidRequestError, JaxserveError
from jaxserve.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from jaxserve.core.prediction import LengthPrediction

# Priorities are between the negative of this and this.
MAX_PRIORITY = 2**31 - 1

FinishReason = Literal["stop", "length", "cancelled", "error"]

_short = reprlib.Repr()  # of a `repr`: the first tokens of a prompt, the ends of a text
_short.maxstring = 80


@final
@dataclass(frozen=True)
class AdapterSlot:
    """A loaded adapter in steps and pages.

    Attributes:
      index: its place among the adapters of the device.
      identity: a hash of its contents, part of the keys of its pages.
    """

    index: int
    identity: bytes


@final
@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and its parameters. Immutable; a `Sequence` holds the state of its execution.

    Attributes:
      id: unique within an engine.
      prompt: token ids, at least one. For an encoder-decoder model: the tokens that the encoder
        reads, padding, and the token that answers begin with.
      params: validated sampling parameters.
      arrival_s: time of submission on the engine's clock.
      priority: under the priority order, higher priorities run first.
      deadline_s: time on the engine's clock by which it should end; breaks ties of priority.
      conversation_id: the conversation of this turn, if any, for reports, recordings, and because
        its pages are expected to be reused; prefix caches compare tokens.
      prediction: predicted output length, if there is one.
      stop_token_ids: `params.stop_token_ids` and, unless ignored, the model's end tokens.
      end_token_ids: the model's end tokens, whether they are ignored or not.
      seed: `params.seed`, or a seed drawn by the runtime.
      adapter: the adapter that `params` name; None for the weights without one.
      num_encoded: leading tokens of the prompt that the encoder computes as a whole, with their
        padding, which fill whole pages; 0 for a model without an encoder.
      num_padding: padding tokens at their end, which no query attends to.
      grammar: the compiled `params.constraint`, for the engine; None without one.
      thinking: how the answer may think (`models.thinking.Thinking`); None if it is not read.
      awaits_tokens: whether each of its tokens must be read before the next one is chosen, as long
        as something binds them (`Sequence.awaits_tokens`).
      has_bounds: whether `params` bound any of its latencies.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival_s: float
    stop_token_ids: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    seed: int = 0
    priority: int = 0
    deadline_s: float | None = None
    conversation_id: str | None = None
    prediction: LengthPrediction | None = None
    adapter: AdapterSlot | None = None
    num_encoded: int = 0
    num_padding: int = 0
    grammar: object = field(default=None, compare=False, repr=False)
    thinking: object = field(default=None, compare=False, repr=False)
    awaits_tokens: bool = field(init=False, compare=False, repr=False)
    has_bounds: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Read for every running sequence in every step.
        object.__setattr__(self, "awaits_tokens", self.params.is_followed)
        object.__setattr__(self, "has_bounds", bool(self.params.bounds))

    def __repr__(self) -> str:
        """Return the id, the number of prompt tokens with the first ones, and the parameters."""
        tokens = f"{len(self.prompt)} tokens {_short.repr(self.prompt)}"
        return f"Request({self.id!r}, {tokens}, {self.params!r})"

    @cached_property
    def prompt_array(self) -> np.ndarray:
        """Return the prompt as int32 [tokens], made once; a prompt may have a million tokens."""
        import numpy as np  # the command line's help does without

        return np.asarray(self.prompt, np.int32)

    @property
    def encoder_prompt(self) -> tuple[int, ...]:
        """Return the tokens that the encoder reads; empty for a model without an encoder."""
        return self.prompt[: self.num_encoded - self.num_padding]

    @property
    def given_prompt(self) -> tuple[int, ...]:
        """Return the prompt as given, without the tokens added for an encoder-decoder model."""
        return self.encoder_prompt or self.prompt

    @property
    def due_s(self) -> float | None:
        """Return the earliest time on the engine's clock at which it is due; None without a bound.

        It is the earliest of: the bound of its first token, the bound of its end, and the end of
        an answer of `max_tokens` whose tokens each take their bound.
        """
        params = self.params
        bounds = [params.first_token_bound, params.latency_bound]
        if params.token_bound is not None and params.max_tokens is not None:
            bounds.append(params.token_bound * params.max_tokens)
        return min((self.arrival_s + s for s in bounds if s is not None), default=None)

    def end_length(self, max_length: int, sample_index: int) -> int:
        """Return the maximum number of prompt and output tokens of a sample.

        Only executors and the engine may call this: a policy must not know forced lengths.
        """
        forced = self.params.forced_lengths
        if forced is None:
            return max_length
        return min(max_length, len(self.prompt) + forced[sample_index])


def padded_to_pages(tokens: Sequence[int], page_size: int) -> tuple[int, ...]:
    """Return the tokens of an encoder's prompt, padded to whole pages."""
    return (*tokens, *(0,) * (-len(tokens) % page_size))


@final
@dataclass(frozen=True, kw_only=True)
class EncoderPrompts:
    """The tokens that an encoder-decoder model adds to those that its encoder reads.

    Attributes:
      start_token_id: the token that answers begin with.
      page_size: tokens of a page; the decoder's tokens begin with one.
    """

    start_token_id: int
    page_size: int

    def around(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
        """Return `Request.prompt`, `num_encoded` and `num_padding` for the encoder's tokens."""
        padded = padded_to_pages(tokens, self.page_size)
        return (*padded, self.start_token_id), len(padded), len(padded) - len(tokens)


def check_messages(messages: Iterable[Mapping[str, Any]]) -> None:
    """Check that each message has a role and a content, without which only an assistant's may be.

    Raises:
      InvalidRequestError: a message lacks one of them; it names the message.
    """
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidRequestError(
                f"message {index} has the role {role!r}; pass 'user', 'assistant', 'system' or "
                "another one of the model's chat template"
            )
        if role != "assistant" and message.get("content") is None:
            raise InvalidRequestError(
                f"message {index} has no content; pass {{'role': {role!r}, 'content': text}}"
            )


def check_id(request_id: object, own_ids: str) -> None:
    """Raise InvalidRequestError if an id is given that is not text or starts with `own_ids`."""
    if request_id is None:
        return
    if not isinstance(request_id, str):
        raise InvalidRequestError(
            f"request_id={request_id!r} is not allowed; pass a string, or None for a generated id"
        )
    if request_id.startswith(own_ids):
        raise InvalidRequestError(
            f"request_id={request_id!r}: ids that start with {own_ids!r} are reserved; choose "
            "another"
        )


def deadline_at(deadline_s: object, now_s: float) -> float | None:
    """Return the deadline `deadline_s` seconds after `now_s`; None without one.

    Raises InvalidRequestError if it is neither a number nor None.
    """
    if deadline_s is None:
        return None
    try:
        is_text = isinstance(deadline_s, (bool, str))
        seconds = math.nan if is_text else float(deadline_s)  # pyrefly: ignore[bad-argument-type]
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if math.isnan(seconds):
        raise InvalidRequestError(
            f"deadline_s={reprlib.repr(deadline_s)} is not allowed; pass a number of seconds from "
            "now, or None"
        )
    return now_s + seconds


def drawn_seed(seed: int, number: int) -> int:
    """Return the seed of request `number` without a seed, in a runtime or fleet with `seed`."""
    return (seed * 0x85EBCA6B + number * 0xC2B2AE35 + 1) % 2**32


@final
@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """The natural log-probability of a token, and those of the likeliest at its position.

    Attributes:
      logprob: the model's, before penalties, bias, temperature and truncation; so are those of
        `top`.
      processed_logprob: that of the distribution that the token was drawn from, after these. Of a
        greedy request, after penalties and bias. Of a prompt token, as if it were drawn there; of a
        greedy request's prompt, the same as `logprob`.
    """

    token_id: int
    logprob: float
    processed_logprob: float
    top: tuple[tuple[int, float], ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class Timing:
    """The times of a request's events on the engine's clock; None if an event did not happen."""

    arrival_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def latency_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.arrival_s


@final
@dataclass(frozen=True, kw_only=True)
class Sample:
    """One generated continuation.

    Attributes:
      text: ends before a stop string. Tokens are not split, so the last one may reach past it.
      reasoning: what the model thought, of a chat (`SamplingParams.separate_reasoning`); `text` is
        the answer without it. None if it did not think.
      num_reasoning_tokens: tokens of the thinking, with its marks.
      token_ids: with the stop token that ended the sample, which a trainer needs.
      version_runs: (version, number of tokens) of the weights that computed the tokens, in
        order; versions increase. See `Runtime.update_params`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    version_runs: tuple[tuple[int, int], ...] = ()
    reasoning: str | None = None
    num_reasoning_tokens: int = 0

    def __repr__(self) -> str:
        """Return the text, shortened, the number of tokens, and why it ended."""
        num_tokens = len(self.token_ids)
        return f"Sample({_short.repr(self.text)}, {num_tokens} tokens, {self.finish_reason!r})"

    @property
    def weights_versions(self) -> tuple[int, ...]:
        """Return the version of the weights that computed each token."""
        return tuple(version for version, count in self.version_runs for _ in range(count))


@final
@dataclass(frozen=True, kw_only=True)
class Completion:
    """The answer to one prompt: `params.n` samples, the first with shortcuts.

    A request that failed has `finish_reason == "error"` and the typed `error`.

    Attributes:
      predicted_tokens: predicted mean length of each sample, at most `params.max_tokens`;
        None without a predictor.
      num_cached_tokens: tokens of the prompt whose KV the first sample found in the prefix cache.
      pooled: float32 [width] of a request that `pools`: the pooled hidden state, neither normalised
        nor cut, or the logits of the model's labels. None for other requests.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    timing: Timing
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    conversation_id: str | None = None
    predicted_tokens: int | None = None
    num_cached_tokens: int = 0
    pooled: np.ndarray | None = field(default=None, compare=False)
    error: JaxserveError | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        """Return the id, the number of prompt tokens, and the samples or the error."""
        if self.error is not None:
            told = f"{type(self.error).__name__}: {self.error}"
        elif self.pooled is not None:
            told = f"pooled to {len(self.pooled)} numbers"
        else:
            told = ", ".join(map(repr, self.samples))
        latency_s = self.timing.latency_s
        took = "" if latency_s is None else f", {latency_s:.3g} s"
        num_prompt = len(self.prompt_token_ids)
        return f"Completion({self.request_id!r}, {num_prompt} prompt tokens, {told}{took})"

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def reasoning(self) -> str | None:
        return self.samples[0].reasoning

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.samples[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason

    @property
    def weights_versions(self) -> tuple[int, ...]:
        return self.samples[0].weights_versions

    @property
    def weights_version(self) -> int | None:
        """The oldest version of weights that computed a token of any sample; None without tokens.

        `Runtime.weights_version` minus this one is the staleness of the completion.
        """
        oldest = (sample.version_runs[0][0] for sample in self.samples if sample.version_runs)
        return min(oldest, default=None)
