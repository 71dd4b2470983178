"""The types that bodies of several endpoints share: strict fields, messages, tools, scores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar, final

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from jaxserve.core.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)

MAX_INT32 = 2**31 - 1
# Nesting depth of JSON values where any are allowed. Pydantic writes at most 255 levels.
MAX_DEPTH = 128

Item = TypeVar("Item")
# A list of a request is checked up to its first bad item: pydantic would describe all of them, in
# several kilobytes each.
Items = Annotated[list[Item], Field(fail_fast=True)]


def _in_parts(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check the entries of an object up to the first part that has bad ones, as `Items` does."""
    if not isinstance(given, dict):
        return check(given)
    entries, checked = iter(given.items()), {}
    while part := dict(islice(entries, MAX_LOGIT_BIAS + 1)):  # one too many, in one part
        checked |= check(part)
    return checked


IN_PARTS = WrapValidator(_in_parts)
# For an empty list, which means the same as none.
NONE_IF_EMPTY = AfterValidator(lambda given: given or None)

StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
# Without control characters, which paths of requests cannot have.
ConversationId = Annotated[str, Field(max_length=256, pattern=r"^[^\x00-\x1f]+$")]


def checked_json(value: Any) -> Any:
    """Return an object or a list from JSON if it can be written as JSON again, or raise ValueError.

    Errors are nesting beyond `MAX_DEPTH`, text that is not Unicode, and numbers such as NaN.
    """
    depth, level = 0, [value]
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep; make it flatter")
        children = [each.values() if isinstance(each, dict) else each for each in level]
        level = [one for some in children for one in some if isinstance(one, (dict, list))]
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


JsonObject = Annotated[dict[str, Any], IN_PARTS, AfterValidator(checked_json)]


def predicted() -> Any:
    """Return the field of an answer for its predicted length."""
    return optional("Expected tokens of each sample, where the server has a length predictor.")


def optional(description: str | None = None) -> Any:
    """Return a field of an answer that is left out if it is None."""
    return Field(None, description=description, exclude_if=lambda value: value is None)


def unused() -> Any:
    """Return a field that must be null (parameter not implemented)."""
    return Field(None, description="Not supported; null is the same as leaving it out.")


@final
@dataclass(frozen=True)
class Ignored:
    """Marks a field of a request that changes no answer, except for values that are `honoured`."""

    honoured: tuple[Any, ...] = ()

    def is_ignored(self, value: Any) -> bool:
        given = value if isinstance(value, list) else [value]
        return value is not None and not all(each in self.honoured for each in given)


# A field that may have any value, and changes no answer.
NoEffect = Annotated[Any, Ignored()]


def no_effect(description: str) -> Any:
    """Return a `NoEffect` of a message or a tool, which chat templates do not see."""
    return Field(None, description=f"Ignored: {description}", exclude=True)


class Strict(BaseModel):
    """The body of a request: an unknown field, or a value of another type, is an error."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        str_min_length=0,  # with any limit, a text with lone surrogates is an error
    )

    @model_validator(mode="before")
    @classmethod
    def _with_one_unknown(cls, given: Any) -> Any:
        """Return a body with only the first of its unknown fields, each of which is an error."""
        if not isinstance(given, dict) or len(given) <= len(cls.model_fields):
            return given
        names = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(name for name in given if name not in names)
        return {name: given[name] for name in (*names & given.keys(), unknown)}

    def ignored(self) -> Iterator[str]:
        """Yield the names of given fields that change no answer, those of options with a dot."""
        marks = _marks(type(self))
        for name in self.model_fields_set:
            value = getattr(self, name)
            if name in marks and marks[name].is_ignored(value):
                yield name
            elif isinstance(value, Strict):
                yield from (f"{name}.{inner}" for inner in value.ignored())


@cache
def _marks(kind: type[Strict]) -> dict[str, Ignored]:
    return {
        name: mark
        for name, field in kind.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, Ignored)
    }


class Reply(BaseModel):
    """The body of an answer."""


class ErrorDetail(Reply):
    """An error in the format of OpenAI's API."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(Reply):
    """The body of every answer with a status of 400 or more."""

    error: ErrorDetail


class MessagesErrorDetail(Reply):
    """An error in the format of Anthropic's API."""

    type: str
    message: str


class MessagesErrorReply(Reply):
    """The same of an answer in the form of Anthropic's API."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(
        None, description="Send a last chunk with the numbers of tokens."
    )
    include_obfuscation: Annotated[bool | None, Ignored((False,))] = Field(
        None, description="Nothing is padded."
    )
    continuous_usage_stats: Annotated[bool | None, Ignored((False,))] = Field(
        None, description="The numbers of tokens come with the last chunk only."
    )


class CachedTokens(Reply):
    """The tokens of a prompt whose KV was cached."""

    cached_tokens: int


class CompletionTokensDetails(Reply):
    """Parts of the completion."""

    reasoning_tokens: int


class Usage(Reply):
    """Numbers of tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokensDetails | None = optional(
        "Of an answer with thinking."
    )

    @classmethod
    def of(
        cls,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int,
        reasoning_tokens: int = 0,
    ) -> Usage:
        """Return the usage with its total."""
        details = CompletionTokensDetails(reasoning_tokens=reasoning_tokens)
        return cls(
            completion_tokens_details=details if reasoning_tokens else None,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=CachedTokens(cached_tokens=cached_tokens),
        )


class StructuredOutputs(Strict):
    """What the answer has to match, in vLLM's form: exactly one of these."""

    json_: JsonObject | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Choosing(Strict):
    """How tokens are chosen and when an answer ends; see `SamplingParams`."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | str | None = Field(None, description="A JSON schema.")
    guided_regex: str | None = None
    guided_grammar: str | None = Field(None, description="In Lark's notation, or GBNF.")
    guided_choice: Items[str] | None = None

    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy; default 1.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INT32, description="0 and -1 keep all tokens.")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-100, le=100)
    frequency_penalty: float | None = Field(None, ge=-100, le=100)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-1e9, le=1e9)]],
            Field(max_length=MAX_LOGIT_BIAS),
            IN_PARTS,
        ]
        | None
    ) = Field(
        None,
        description="Token id -> number added to its logit.",
        json_schema_extra={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}},
    )
    seed: int | None = Field(
        None,
        ge=-(2**63),
        le=2**63 - 1,
        description="The sampler takes it modulo 2**32, so seeds from -2**31 to 2**31-1 differ.",
    )
    stop: (
        Annotated[str, Field(max_length=MAX_STOP_CHARS)]
        | Annotated[Items[StopText], Field(max_length=MAX_STOPS)]
        | None
    ) = None
    stop_token_ids: Items[TokenId] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT32)
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    latency_bound: float | None = Field(
        None, gt=0, le=1e9, description="Seconds from the submission to the end of the answer."
    )
    first_token_bound: float | None = Field(
        None, gt=0, le=1e9, description="Seconds from the submission to the first token."
    )
    token_bound: float | None = Field(
        None, gt=0, le=1e9, description="Mean seconds per token after the first."
    )


class Unheeded(Strict):
    """Fields of OpenAI's API that change no answer of this server."""

    metadata: NoEffect = Field(None, description="Ignored.")
    prompt_cache_key: NoEffect = Field(None, description="Prefixes are cached in any case.")
    prompt_cache_options: NoEffect = Field(None, description="Ignored.")
    prompt_cache_retention: NoEffect = Field(None, description="Ignored.")
    safety_identifier: str | None = Field(None, description="Written to the access log.")
    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority", "fast"] | None,
        Ignored(("auto", "default")),
    ] = Field(None, description="There is only one tier, which the answer of a chat names.")
    store: Annotated[bool | None, Ignored((False,))] = Field(
        None, description="Answers are not stored."
    )
    user: str | None = Field(
        None, description="Written to the access log; policy vtc serves all users equally."
    )


class Asking(Choosing, Unheeded):
    """The fields of a request that are the same for chats and completions."""

    model: str | None = Field(None, description="The name in `/v1/models`; optional.")
    n: int | None = Field(None, ge=1, le=1024, description="Number of samples.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(
        None,
        ge=-MAX_INT32,
        le=MAX_INT32,
        description="Higher goes first; 0 unless the policy has a priority order.",
    )
    return_token_ids: bool | None = Field(
        None,
        description="Add the token ids of the prompt and of each choice to the answer; in a stream "
        "those of the prompt come once, at the beginning.",
    )


FinishReason = Literal["stop", "length", "tool_calls"]


class ScoredToken(Reply):
    """A token and its natural log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None = Field(
        description="A part of a character where several tokens make it, of which the last has it "
        "as its text. Null for a token that adds nothing."
    )


class ScoredChoice(ScoredToken):
    """A token of the answer, and the likeliest tokens at its position."""

    top_logprobs: list[ScoredToken]


class PromptLogprob(Reply):
    """The log-probability of a token of the prompt, in vLLM's format."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Reply):
    """Log-probabilities of tokens, with the position of each token in the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]

    def followed_by(self, others: CompletionLogprobs) -> CompletionLogprobs:
        """Return these log-probabilities followed by later ones of the same form."""
        both: dict[str, Any] = {
            name: None if one is None else [*one, *other]
            for (name, one), (_, other) in zip(self, others, strict=True)
        }
        return CompletionLogprobs(**both)


class TextResponseFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectResponseFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Strict):
    """A JSON schema. It is enforced with and without `strict`."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaResponseFormat(Strict):
    """JSON that validates."""

    type: Literal["json_schema"]
    json_schema: JsonSchema

    @property
    def given_schema(self) -> JsonObject:
        return self.json_schema.schema_


ResponseFormat = Annotated[
    TextResponseFormat | JsonObjectResponseFormat | JsonSchemaResponseFormat,
    Field(discriminator="type"),
]


class JsonSchemaTextFormat(JsonSchema):
    """JSON that validates, as `/v1/responses` writes it."""

    type: Literal["json_schema"]

    @property
    def given_schema(self) -> JsonObject:
        return self.schema_


TextFormat = Annotated[
    TextResponseFormat | JsonObjectResponseFormat | JsonSchemaTextFormat,
    Field(discriminator="type"),
]


class Function(Strict):
    """A function that the model may call; `parameters` is a JSON schema of an object.

    Where a call is demanded, the schema is enforced with and without `strict`.
    """

    name: Annotated[str, Field(min_length=1, max_length=128, pattern="^[a-zA-Z0-9_.-]+$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool."""

    type: Literal["function"]
    function: Function
    cache_control: NoEffect = no_effect("prefixes are cached in any case.")


class ResponseTool(Function):
    """A tool, as `/v1/responses` writes it."""

    type: Literal["function"]

    def as_tool(self) -> Tool:
        """Return it in the form of a chat's tool."""
        function = Function(**self.model_dump(exclude={"type"}))
        return Tool(type="function", function=function)


class NamedFunction(Strict):
    """The name of a function."""

    name: str


class NamedTool(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class NamedResponseTool(NamedFunction):
    """The tool that has to be called, as `/v1/responses` writes it."""

    type: Literal["function"]

    def as_tool(self) -> NamedTool:
        """Return it in the form of a chat's tool choice."""
        return NamedTool(type="function", function=NamedFunction(name=self.name))


ResponseToolChoice = Literal["none", "auto", "required"] | NamedResponseTool


class TextPart(Strict):
    """A part of a message. This server reads text only."""

    type: Literal["text"]
    text: str
    cache_control: NoEffect = no_effect("prefixes are cached in any case.")
    prompt_cache_breakpoint: NoEffect = no_effect("prefixes are cached in any case.")


Content = str | Items[TextPart]


class CalledFunction(Strict):
    """The function of a call in an earlier answer; `arguments` is JSON."""

    name: str
    arguments: str
    parsed_arguments: NoEffect = no_effect("what OpenAI's client reads in `arguments`.")


class ToolCall(Strict):
    """A call of a function in an earlier answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: NoEffect = no_effect("its place, which the list of calls says.")


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
    """An earlier answer. What was thought is rendered as the chat template wants."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="As reasoning_content.")
    thinking: str | None = Field(None, description="As reasoning_content.")
    name: str | None = None
    refusal: None = None
    tool_calls: Annotated[Items[ToolCall], NONE_IF_EMPTY] | None = None
    # Fields that an answer has if OpenAI's client writes all of them.
    annotations: NoEffect = no_effect("where another service found what the content says.")
    parsed: NoEffect = no_effect("what OpenAI's client reads in `content`.")
    audio: None = unused()
    function_call: None = unused()


class ToolMessage(Strict):
    """The result of a call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[
    InstructionMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


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
    reasoning_content: str | None = optional("What the model thought.")
    reasoning: str | None = optional("The same, under its newer name.")
    tool_calls: list[AnsweredCall] | None = optional()


class Delta(Reply):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = optional()
    content: str | None = optional()
    reasoning_content: str | None = optional()
    reasoning: str | None = optional()
    tool_calls: list[AddedCall] | None = optional()


def as_template_message(message: Any) -> dict[str, Any]:
    """Return a message as chat templates read it: one text, and the role "system".

    The arguments of calls are the text that was sent; see `Tools.prompt`.
    """
    given = message.model_dump(exclude_none=True)
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if not isinstance(content, str):
        content = "".join(part.text for part in content or ())
    return {**given, "role": role, "content": content}
