"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, final

from jaxserve.core.errors import JaxserveError
from jaxserve.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.core.prediction import LengthPrediction

FinishReason = Literal["stop", "length", "cancelled", "error"]


@final
@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt on its way through the engine. Immutable; `Sequence` is what moves.

    Attributes:
      id: unique within an engine.
      prompt: token ids, at least one.
      params: already validated.
      arrival_s: engine clock at submission, seconds.
      priority: higher goes first under the priority order.
      deadline_s: engine clock by which it should end; breaks ties of priority.
      conversation_id: whose turn this is; None for nobody's. For reports and recordings: what a
        cache has of it is told from its tokens.
      prediction: of its output length; None where nobody predicted it.
      stop_token_ids: `params.stop_token_ids` and, unless ignored, the model's end tokens.
      seed: `params.seed`, or one drawn by the runtime.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival_s: float
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    priority: int = 0
    deadline_s: float | None = None
    conversation_id: str | None = None
    prediction: LengthPrediction | None = None

    def end_length(self, max_length: int, sample_index: int) -> int:
        """Prompt and output tokens at which a sample limited to `max_length` ends.

        For executors and for what they delivered; a policy that asks would know the future.
        """
        forced = self.params.forced_lengths
        if forced is None:
            return max_length
        return min(max_length, len(self.prompt) + forced[sample_index])


def drawn_seed(seed: int, number: int) -> int:
    """The seed of request `number` that brings none, in a runtime or fleet whose own is `seed`."""
    return (seed * 0x85EBCA6B + number * 0xC2B2AE35 + 1) % 2**32


@final
@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one token and of the likeliest ones at its position (natural log)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class Timing:
    """When things happened, in seconds on the engine's clock; None for never."""

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

    `token_ids` includes the stop token that ended it, as a trainer needs it. `text` ends before
    a stop string; tokens are never split, so the last one may reach past `text`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Completion:
    """The answer to one prompt: `params.n` samples; the usual single one has shortcuts.

    A request that failed has `finish_reason == "error"` and the typed `error`. `conversation_id` is
    that of its request.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    timing: Timing
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    conversation_id: str | None = None
    error: JaxserveError | None = field(default=None, compare=False)

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.samples[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason
