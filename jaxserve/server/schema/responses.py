"""`/v1/responses`: OpenAI's newer form of a chat, for text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from jaxserve.core.sampling_params import MAX_LOGPROBS
from jaxserve.server.schema.base import (
    IN_PARTS,
    MAX_INT32,
    ConversationId,
    Items,
    Reply,
    ScoredChoice,
    Strict,
    optional,
    predicted,
    unused,
)
from jaxserve.server.schema.structured import ResponseTool, ResponseToolChoice, TextFormat


class InputText(Strict):
    """A part of what the user says."""

    type: Literal["input_text"]
    text: str


class GivenOutputText(Strict):
    """A part of an earlier answer, as this server gave it."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Strict):
    """A message; an answer of this server can be sent back as it is."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[Annotated[InputText | GivenOutputText, Field(discriminator="type")]]
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None
    phase: None = None


class GivenCall(Strict):
    """A call of a function in an earlier answer, as this server gave it."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class CallOutput(Strict):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[Items[InputText], Field(min_length=1)]
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


def _item_type(item: Any) -> Any:
    """Return the type of an item, which a message may leave out."""
    given = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return given or "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[GivenCall, Tag("function_call")]
    | Annotated[CallOutput, Tag("function_call_output")],
    Discriminator(_item_type),
]


class TextOptions(Strict):
    """Options of the text."""

    format: TextFormat | None = None


class ResponseStreamOptions(Strict):
    """Options of a streamed response."""

    include_obfuscation: Literal[False] | None = Field(None, description="Nothing is padded.")


class ConversationParam(Strict):
    """A conversation that the server keeps."""

    id: ConversationId


class ResponseRequest(Strict):
    """Messages, and how the next one is generated."""

    input: Annotated[str, Field(min_length=1)] | Annotated[Items[InputItem], Field(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    conversation: ConversationId | ConversationParam | None = Field(
        None, description="As `conversation_id` of a chat; `input` is new then."
    )
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: Items[Literal["message.output_text.logprobs"]] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: Literal[False] | None = Field(None, description="Responses are not stored.")
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    text: TextOptions | None = None
    tools: Annotated[Items[ResponseTool], Field(max_length=128)] | None = None
    tool_choice: ResponseToolChoice | None = Field(None, description='"auto" by default.')
    parallel_tool_calls: bool | None = Field(None, description="Whether an answer may call twice.")
    metadata: Annotated[dict[str, str], IN_PARTS] | None = Field(
        None, description="Returned with the response."
    )
    user: str | None = None
    safety_identifier: str | None = None
    max_tool_calls: None = unused()
    previous_response_id: None = unused()
    prompt: None = unused()
    prompt_cache_key: None = unused()
    prompt_cache_retention: None = unused()
    reasoning: None = unused()
    service_tier: None = unused()


class OutputText(Reply):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[ScoredChoice] = []


class OutputMessage(Reply):
    """The message that was generated."""

    type: Literal["message"] = "message"
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(Reply):
    """A call of a function in the answer; `arguments` is JSON."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


OutputItem = OutputMessage | OutputCall


class Incomplete(Reply):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class InputTokensDetails(Reply):
    """Parts of the input; the server does not say which tokens were cached."""

    cached_tokens: int = 0


class OutputTokensDetails(Reply):
    """Parts of the output; no tokens are hidden as reasoning."""

    reasoning_tokens: int = 0


class ResponseUsage(Reply):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails = InputTokensDetails()
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class ResponseReply(Reply):
    """The answer, and the options that it was generated with."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
    conversation: dict[str, str] | None = optional()
    predicted_tokens: int | None = predicted()


class ResponseEvent(Reply):
    """One event of a streamed response; which fields it has depends on its type."""

    type: str
    sequence_number: int
    response: ResponseReply | None = optional()
    output_index: int | None = optional()
    content_index: int | None = optional()
    item_id: str | None = optional()
    item: OutputItem | None = optional()
    part: OutputText | None = optional()
    delta: str | None = optional()
    text: str | None = optional()
    name: str | None = optional()
    arguments: str | None = optional()
    logprobs: list[ScoredChoice] | None = optional()
