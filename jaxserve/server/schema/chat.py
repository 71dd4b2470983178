"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxserve.core.sampling_params import MAX_LOGPROBS
from jaxserve.server.schema.base import (
    MAX_INT32,
    Asking,
    ConversationId,
    FinishReason,
    Items,
    PromptLogprobs,
    Reply,
    ScoredChoice,
    Strict,
    Usage,
    optional,
    predicted,
    unused,
)
from jaxserve.server.schema.structured import ResponseFormat, Tool, ToolChoice


class TextPart(Strict):
    """A part of a message. This server reads text only."""

    type: Literal["text"]
    text: str


Content = str | Items[TextPart]


class CalledFunction(Strict):
    """The function of a call in an earlier answer; `arguments` is JSON."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call of a function in an earlier answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class InstructionMessage(Strict):
    """What the answer has to obey. Templates know "system", which "developer" becomes."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Strict):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(Strict):
    """An earlier answer."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    refusal: None = None
    tool_calls: Annotated[Items[ToolCall], Field(min_length=1)] | None = None
    # Fields that an answer has where OpenAI's client writes all of them.
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = unused()
    function_call: None = unused()


class ToolMessage(Strict):
    """The result of a call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[
    InstructionMessage | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]


class ChatRequest(Asking):
    """A chat, and how its next message is generated."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    max_tokens: int | None = Field(
        None, ge=1, le=MAX_INT32, description="The former name of max_completion_tokens."
    )
    response_format: ResponseFormat | None = None
    tools: Annotated[Items[Tool], Field(min_length=1, max_length=128)] | None = None
    tool_choice: ToolChoice | None = Field(None, description='"auto" by default.')
    parallel_tool_calls: bool | None = Field(None, description="Whether an answer may call twice.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    conversation_id: ConversationId | None = Field(
        None,
        description="Continue the conversation with this id, or begin it. `messages` are then the "
        "new ones only, and the server keeps the history.",
    )
    modalities: Annotated[Items[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    service_tier: Literal["auto", "default"] | None = Field(
        None, description="Both are the only tier that there is, which the answer then names."
    )
    store: Literal[False] | None = Field(None, description="Answers are not stored.")
    safety_identifier: str | None = Field(None, description="Written to the access log.")
    audio: None = unused()
    function_call: None = unused()
    functions: None = unused()
    metadata: None = unused()
    prediction: None = unused()
    prompt_cache_key: None = unused()
    prompt_cache_retention: None = unused()
    reasoning_effort: None = unused()
    verbosity: None = unused()
    web_search_options: None = unused()


class Logprobs(Reply):
    """The log-probabilities of a message's tokens."""

    content: list[ScoredChoice]
    refusal: None = None


class AnsweredFunction(Reply):
    """The function that the model calls; `arguments` is JSON."""

    name: str
    arguments: str


class AnsweredCall(Reply):
    """A call in the answer."""

    id: str
    type: Literal["function"] = "function"
    function: AnsweredFunction


class AddedFunction(Reply):
    """What a chunk adds to a call: its name at its beginning, or arguments."""

    name: str | None = optional()
    arguments: str


class AddedCall(Reply):
    """What a chunk adds to the call at this place among the calls."""

    index: int
    id: str | None = optional()
    type: Literal["function"] | None = optional()
    function: AddedFunction


class AnswerMessage(Reply):
    """The message that was generated."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[AnsweredCall] | None = optional()


class ChatChoice(Reply):
    """One sample."""

    index: int
    message: AnswerMessage
    logprobs: Logprobs | None = None
    finish_reason: FinishReason
    token_ids: list[int] | None = optional()


class ChatReply(Reply):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = optional()
    prompt_token_ids: list[int] | None = optional()
    conversation_id: str | None = optional()
    service_tier: Literal["default"] | None = optional()
    predicted_tokens: int | None = predicted()


class Delta(Reply):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = optional()
    content: str | None = optional()
    tool_calls: list[AddedCall] | None = optional()


class ChunkChoice(Reply):
    """What a chunk adds to one sample."""

    index: int
    delta: Delta
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | None = optional()


class ChatChunk(Reply):
    """One event of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = optional()
    service_tier: Literal["default"] | None = optional()
    prompt_token_ids: list[int] | None = optional()


class CountedChatChunk(ChatChunk):
    """One event of an answer with usage, which is null in all but the last one."""

    usage: Usage | None = None


def as_template_message(message: Any) -> dict[str, Any]:
    """Return a message as chat templates read it: one text, and the role "system".

    The arguments of calls are the text that was sent; see `Tools.prompt`.
    """
    given = message.model_dump(exclude_none=True, exclude={"annotations"})
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if not isinstance(content, str):
        content = "".join(part.text for part in content or ())
    return {**given, "role": role, "content": content}
