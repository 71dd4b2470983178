"""`/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jaxserve.core.sampling_params import MAX_LOGPROBS
from jaxserve.server.schema.base import (
    MAX_INT32,
    Asking,
    FinishReason,
    Items,
    PromptLogprobs,
    Reply,
    TokenId,
    Usage,
    optional,
    predicted,
    unused,
)

Tokens = Annotated[Items[TokenId], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]


class CompletionRequest(Asking):
    """One or several prompts, and how they are continued."""

    prompt: (
        Text
        | Annotated[Items[Text], Field(min_length=1)]
        | Tokens
        | Annotated[Items[Tokens], Field(min_length=1)]
    )
    max_tokens: int | None = Field(
        None, ge=0, le=MAX_INT32, description="16 by default; 0 with echo, for the prompt alone."
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = Field(None, description="Put the prompt before each completion.")
    best_of: None = unused()
    suffix: None = unused()


class CompletionLogprobs(Reply):
    """Log-probabilities of tokens, with the position of each token in the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]

    def followed_by(self, others: CompletionLogprobs) -> CompletionLogprobs:
        """Return these and others of the same form."""
        both = zip(self, others, strict=True)
        return CompletionLogprobs(
            **{name: one and [*one, *other] for (name, one), (_, other) in both}
        )


class CompletionChoice(Reply):
    """One sample of one prompt; with n samples, sample i of prompt p has the index p * n + i."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = optional()
    prompt_token_ids: list[int] | None = optional()
    prompt_logprobs: PromptLogprobs | None = optional()
    predicted_tokens: int | None = predicted()


class CompletionReply(Reply):
    """The completions; also one event of a streamed answer, with what it adds."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = optional()


class CountedCompletionChunk(CompletionReply):
    """One event of an answer with usage, which is null in all but the last one."""

    usage: Usage | None = None
