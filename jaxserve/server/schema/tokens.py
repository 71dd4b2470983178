"""`/tokenize`, `/detokenize`, and tokens in and out for rollouts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jaxserve.core.sampling_params import MAX_LOGPROBS
from jaxserve.server.schema.base import (
    MAX_INT32,
    Choosing,
    Items,
    Reply,
    Strict,
    TokenId,
    Usage,
    optional,
    predicted,
)
from jaxserve.server.schema.chat import Message
from jaxserve.server.schema.structured import Tool


class TokenizeRequest(Strict):
    """Text, or a chat for the model's template: exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Items[Message], Field(min_length=1)] | None = None
    tools: Annotated[Items[Tool], Field(min_length=1, max_length=128)] | None = Field(
        None, description="Of a chat: the tools that it offers."
    )
    add_special_tokens: bool | None = Field(None, description="Of a prompt; true by default.")
    add_generation_prompt: bool | None = Field(None, description="Of a chat; true by default.")
    return_token_strs: bool | None = None


class TokenizeReply(Reply):
    """Token ids, their number, and the model's limit of tokens."""

    tokens: list[int]
    count: int
    max_model_len: int | None
    token_strs: list[str] | None = optional()


class DetokenizeRequest(Strict):
    """Token ids."""

    model: str | None = None
    tokens: Items[TokenId]


class DetokenizeReply(Reply):
    """The text of the tokens."""

    prompt: str


class GenerateParams(Choosing):
    """Sampling parameters of `/inference/v1/generate`."""

    max_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    n: int | None = Field(None, ge=1, le=1024)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class GenerateRequest(Strict):
    """A prompt of token ids, answered with token ids."""

    token_ids: Annotated[Items[TokenId], Field(min_length=1)]
    sampling_params: GenerateParams = Field(
        default_factory=lambda: GenerateParams.model_validate({})
    )
    model: str | None = None
    priority: int | None = Field(None, ge=-MAX_INT32, le=MAX_INT32)
    stream: bool | None = None


class TopToken(Reply):
    """One of the likeliest tokens at a position."""

    token_id: int
    logprob: float


class GenerateChoice(Reply):
    """One sample, or what a chunk adds to it. `logprobs` are those of `token_ids`."""

    index: int
    token_ids: list[int]
    logprobs: list[float] | None = optional()
    top_logprobs: list[list[TopToken]] | None = optional()
    finish_reason: Literal["stop", "length"] | None


class GenerateReply(Reply):
    """The samples; also one event of a streamed answer, with what it adds.

    `prompt_logprobs` has null for the first token, which nothing precedes.
    """

    request_id: str
    model: str
    choices: list[GenerateChoice]
    prompt_logprobs: list[float | None] | None = optional()
    predicted_tokens: int | None = predicted()
    usage: Usage | None = optional()
