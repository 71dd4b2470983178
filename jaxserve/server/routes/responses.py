"""`/v1/responses`."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, final

from fastapi import APIRouter
from fastapi.sse import format_sse_event
from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxserve.engine.answers import Piece
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.runtime import Service
from jaxserve.server.errors import invalid
from jaxserve.server.events import (
    EventStream,
    LengthComments,
    compact,
    event_of,
    json_response,
    unless_gone,
)
from jaxserve.server.exchange import Exchange, Group, Job
from jaxserve.server.params import constraint_of
from jaxserve.server.routes.common import (
    ANSWERING,
    Here,
    InClass,
    check_fields,
    documented,
    is_short,
    need_tokenizer,
    new_id,
    now_s,
    replied,
)
from jaxserve.server.schema import (
    IN_PARTS,
    MAX_INT32,
    AddedCall,
    AssistantMessage,
    CachedTokens,
    CalledFunction,
    ConversationId,
    Ignored,
    Items,
    NamedResponseTool,
    NoEffect,
    Reply,
    ResponseTool,
    ResponseToolChoice,
    ScoredChoice,
    Strict,
    TextFormat,
    ToolCall,
    ToolMessage,
    Unheeded,
    as_template_message,
    no_effect,
    optional,
    predicted,
    unused,
)
from jaxserve.server.scores import ContentScores
from jaxserve.server.thinking import Effort, ThinkingFields, template_variables
from jaxserve.server.tools import Tools
from jaxserve.server.turn import Relay, TurnExchange

router = APIRouter()

_LOGPROBS = "message.output_text.logprobs"


class InputText(Strict):
    """A part of what the user says."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: NoEffect = no_effect("prefixes are cached in any case.")


class GivenOutputText(Strict):
    """A part of an earlier answer, as this server gave it."""

    type: Literal["output_text"]
    text: str
    annotations: NoEffect = no_effect("where another service found what the text says.")
    logprobs: NoEffect = no_effect("the text is read.")
    parsed: NoEffect = no_effect("what OpenAI's client reads in `text`.")


class InputMessage(Strict):
    """A message; an answer of this server can be sent back as it is."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[Annotated[InputText | GivenOutputText, Field(discriminator="type")]]
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None
    phase: NoEffect = no_effect("which part of another service's answer it was.")


class GivenCall(Strict):
    """A call of a function in an earlier answer, as this server gave it."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None
    parsed_arguments: NoEffect = no_effect("what OpenAI's client reads in `arguments`.")
    async_: None = unused()
    caller: None = unused()
    namespace: None = unused()


class CallOutput(Strict):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[Items[InputText], Field(min_length=1)]
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None
    caller: None = unused()
    name: None = unused()
    namespace: None = unused()


class ReasoningText(Strict):
    """A part of what was thought."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(Strict):
    """A part of the summary of what was thought."""

    type: Literal["summary_text"]
    text: str


class GivenReasoning(Strict):
    """What was thought before an earlier answer, as this server gave it.

    It is rendered as the chat template wants; a summary counts where there is no text.
    """

    type: Literal["reasoning"]
    id: str | None = None
    summary: Items[SummaryText] | None = None
    content: Items[ReasoningText] | None = None
    encrypted_content: NoEffect = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


def _item_type(item: Any) -> Any:
    """Return the type of an item, which a message may leave out."""
    given = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return given or "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[GivenCall, Tag("function_call")]
    | Annotated[CallOutput, Tag("function_call_output")]
    | Annotated[GivenReasoning, Tag("reasoning")],
    Discriminator(_item_type),
]


class TextOptions(Strict):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: NoEffect = Field(None, description="Ignored.")


class ResponseStreamOptions(Strict):
    """Options of a streamed response."""

    include_obfuscation: Annotated[bool | None, Ignored((False,))] = Field(
        None, description="Nothing is padded."
    )


class ConversationParam(Strict):
    """A conversation that the server keeps."""

    id: ConversationId


class ReasoningOptions(Strict):
    """Options of thinking; a summary is not made."""

    context: NoEffect = None
    effort: Effort | None = None
    generate_summary: NoEffect = None
    mode: NoEffect = None
    summary: NoEffect = None


class ResponseRequest(Unheeded, ThinkingFields):
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
    include: Annotated[
        Items[
            Literal[
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
                "file_search_call.results",
                "message.input_image.image_url",
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "web_search_call.action.sources",
                "web_search_call.results",
            ]
        ]
        | None,
        Ignored((_LOGPROBS,)),
    ] = Field(None, description=f"{_LOGPROBS}; no answer has the others.")
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: Literal[False] | None = None
    truncation: Annotated[Literal["auto", "disabled"] | None, Ignored(("disabled",))] = Field(
        None, description="A prompt that is too long is an error in any case."
    )
    text: TextOptions | None = None
    tools: Annotated[Items[ResponseTool], Field(max_length=128)] | None = None
    tool_choice: ResponseToolChoice | None = Field(None, description='"auto" by default.')
    parallel_tool_calls: bool | None = Field(None, description="Whether an answer may call twice.")
    metadata: Annotated[dict[str, str], IN_PARTS] | None = Field(
        None, description="Returned with the response."
    )
    max_tool_calls: NoEffect = Field(None, description="Of OpenAI's own tools.")
    reasoning: ReasoningOptions | None = None
    access_programs: None = unused()
    background_options: None = unused()
    context_management: None = unused()
    image: None = unused()
    moderation: None = unused()
    previous_response_id: str | None = Field(None, description="Not supported: see `store`.")
    prompt: None = unused()


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


class OutputReasoningText(Reply):
    """The text of what the model thought."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(Reply):
    """What the model thought."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[Any] = []
    content: list[OutputReasoningText]
    status: Literal["in_progress", "completed", "incomplete"]


OutputItem = OutputMessage | OutputCall | OutputReasoning


class Incomplete(Reply):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class OutputTokensDetails(Reply):
    """Parts of the output."""

    reasoning_tokens: int = 0


class ResponseUsage(Reply):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: CachedTokens
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
    part: OutputText | OutputReasoningText | None = optional()
    delta: str | None = optional()
    text: str | None = optional()
    name: str | None = optional()
    arguments: str | None = optional()
    logprobs: list[ScoredChoice] | None = optional()


@final
class OutputItems:
    """The items of one response, one after the other; `items` are the complete ones.

    `make` returns an event of a type, with the given fields.
    """

    def __init__(self, make: Callable[..., ResponseEvent]):
        self.items: list[OutputItem] = []
        self._make = make
        # The open item, as it began, and what has been added to it.
        self._open: OutputItem | None = None
        self._texts: list[str] = []
        self._scored: list[ScoredChoice] = []

    @property
    def is_empty(self) -> bool:
        return self._open is None and not self.items

    def text(self, delta: str, scored: list[ScoredChoice]) -> Iterator[ResponseEvent]:
        """Add text to the message; begin a message if none is open."""
        if self._open is None or self._open.type != "message":
            yield from self.close("completed")
            yield self._begin(OutputMessage(id=new_id("msg"), status="in_progress", content=[]))
            empty = OutputText(text="")
            yield self._make("response.content_part.added", part=empty, **self._at())
        self._texts.append(delta)
        self._scored += scored
        if delta or scored:
            yield self._make(
                "response.output_text.delta", delta=delta, logprobs=scored, **self._at()
            )

    def reasoning(self, delta: str) -> Iterator[ResponseEvent]:
        """Add to what the model thinks; begin an item of it if none is open."""
        if self._open is None or self._open.type != "reasoning":
            yield from self.close("completed")
            yield self._begin(OutputReasoning(id=new_id("rs"), status="in_progress", content=[]))
            empty = OutputReasoningText(text="")
            yield self._make("response.content_part.added", part=empty, **self._at())
        self._texts.append(delta)
        yield self._make("response.reasoning_text.delta", delta=delta, **self._at())

    def call(self, added: AddedCall) -> Iterator[ResponseEvent]:
        """Add to the open call, or begin one."""
        if added.id is not None:
            yield from self.close("completed")
            yield self._begin(
                OutputCall(
                    id=new_id("fc"),
                    call_id=added.id,
                    name=added.function.name or "",
                    arguments="",
                    status="in_progress",
                )
            )
        arguments = added.function.arguments
        if arguments:
            self._texts.append(arguments)
            kind = "response.function_call_arguments.delta"
            yield self._make(kind, delta=arguments, **self._at())

    def close(self, status: Literal["completed", "incomplete"]) -> Iterator[ResponseEvent]:
        """End the open item, if there is one."""
        item, text, scored = self._open, "".join(self._texts), self._scored
        if item is None:
            return
        if item.type == "message":
            part = OutputText(text=text, logprobs=scored)
            kind = "response.output_text.done"
            yield self._make(kind, text=text, logprobs=scored, **self._at())
            yield self._make("response.content_part.done", part=part, **self._at())
            ended: OutputItem = item.model_copy(update={"status": status, "content": [part]})
        elif item.type == "reasoning":
            thought = OutputReasoningText(text=text)
            yield self._make("response.reasoning_text.done", text=text, **self._at())
            yield self._make("response.content_part.done", part=thought, **self._at())
            ended = item.model_copy(update={"status": status, "content": [thought]})
        else:
            kind = "response.function_call_arguments.done"
            yield self._make(kind, name=item.name, arguments=text, **self._at())
            ended = item.model_copy(update={"status": status, "arguments": text})
        index = len(self.items)
        self.items.append(ended)
        self._open, self._texts, self._scored = None, [], []
        yield self._make("response.output_item.done", output_index=index, item=ended)

    def _begin(self, item: OutputItem) -> ResponseEvent:
        self._open = item
        index = len(self.items)
        return self._make("response.output_item.added", output_index=index, item=item)

    def _at(self) -> dict[str, Any]:
        assert self._open is not None, "no item is open"
        at = {"output_index": len(self.items), "item_id": self._open.id}
        return at if self._open.type == "function_call" else {**at, "content_index": 0}


@router.post(
    "/v1/responses",
    response_model=ResponseReply,
    responses=documented(*ANSWERING, stream=True),
    tags=["answers"],
)
async def respond(body: ResponseRequest, http: Request, backend: Here, own: InClass) -> Response:
    """Answer a chat, in the form of OpenAI's newer API."""
    adapter = backend.adapter_of(body.model)
    check_fields(body, backend)
    if body.previous_response_id is not None:
        raise invalid(
            "previous_response_id is not supported: this server stores no responses; send what was "
            "said before in input, or pass a conversation",
            "previous_response_id",
        )
    tokenizer = need_tokenizer(backend.ready_service())
    variables = template_variables(
        tokenizer,
        backend.options.template_kwargs,
        body.chat_template_kwargs,
        effort=None if body.reasoning is None else body.reasoning.effort,
        enable_thinking=body.enable_thinking,
        has_tools=bool(body.tools),
    )
    tools = _tools(body, tokenizer, variables)
    params = own.apply(replace(_params(body, tools), adapter=adapter, tenant=body.user or None))
    answer = ResponseAnswer(body, params, tools, adapter or backend.options.model_name)
    if answer.conversation_id is not None:
        turn = TurnExchange(
            backend,
            answer.conversation_id,
            answer.said,
            answer.params,
            tools,
            instructions=body.instructions or None,
        )
        if not body.stream:
            return json_response(answer.reply(await unless_gone(http.receive, turn.completion())))
        relay = Relay(turn.pieces())
        lengths = LengthComments(params.max_tokens, backend.metrics.pace_s)
        events = ResponseEvents(answer, lengths, lambda: turn.num_prompt_tokens)
        return _stream(relay.groups(), events, relay.close)
    exchange = Exchange(backend, answer.id, at_once=is_short(http, backend, answer.params))
    if not body.stream:
        return await replied(http, exchange, answer)
    lengths = LengthComments(params.max_tokens, backend.metrics.pace_s)
    events = ResponseEvents(answer, lengths, lambda: len(exchange.jobs[0].prompt))
    return _stream(exchange.stream(answer.jobs), events, exchange.close)


def _tools(body: ResponseRequest, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> Tools:
    choice = body.tool_choice
    choice = choice.as_tool() if isinstance(choice, NamedResponseTool) else choice
    given = [tool.as_tool() for tool in body.tools] if body.tools else None
    return Tools(given, choice, body.parallel_tool_calls, tokenizer, variables)


def _params(body: ResponseRequest, tools: Tools) -> SamplingParams:
    wants_scores = _LOGPROBS in (body.include or ())
    if body.top_logprobs is not None and not wants_scores:
        raise invalid("top_logprobs needs include=['message.output_text.logprobs']", "top_logprobs")
    return SamplingParams(
        max_tokens=body.max_output_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        logprobs=(body.top_logprobs or 0) if wants_scores else None,
        **constraint_of(None if body.text is None else body.text.format, tools),
        **body.thinking_params,
    )


def _stream(
    groups: AsyncGenerator[Group], events: ResponseEvents, close: Callable[[], None]
) -> EventStream:
    return EventStream(groups, events, close, last=b"", error_event="error")


def template_messages(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Return the input as chat templates read it; adjacent calls are in one message."""
    found: list[dict[str, Any]] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []  # of the next message of the assistant
    for item, after in zip(items, [*items[1:], None], strict=True):
        if isinstance(item, GivenCall):
            function = CalledFunction(name=item.name, arguments=item.arguments)
            calls.append(ToolCall(id=item.call_id, type="function", function=function))
            if not isinstance(after, GivenCall):
                message = AssistantMessage(role="assistant", tool_calls=calls)
                found.append(as_template_message(message) | _reasoned(thoughts))
                calls = []
        elif isinstance(item, GivenReasoning):
            thoughts += [part.text for part in item.content or item.summary or ()]
        elif isinstance(item, InputMessage):
            role = "system" if item.role == "developer" else item.role
            said = {"role": role, "content": _text(item.content)}
            found.append(said | (_reasoned(thoughts) if role == "assistant" else {}))
        else:
            content = _text(item.output)
            message = ToolMessage(role="tool", content=content, tool_call_id=item.call_id)
            found.append(as_template_message(message))
    return found


def _reasoned(thoughts: list[str]) -> dict[str, str]:
    """Take the thoughts before an answer, as a field of its message."""
    taken = "\n".join(thoughts)
    thoughts.clear()
    return {"reasoning_content": taken} if taken else {}


def _text(content: str | Sequence[InputText | GivenOutputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


@final
@dataclass
class ResponseAnswer:
    body: ResponseRequest
    params: SamplingParams
    tools: Tools
    model: str

    def __post_init__(self) -> None:
        self.id = new_id("resp")
        self.created_at = now_s()
        given = self.body.conversation
        self.conversation_id = given if given is None or isinstance(given, str) else given.id
        self._numbers = itertools.count()
        self._num_output = self._num_reasoning = self._num_cached = 0
        self._answered = self.tools.reader()
        self._scores = ContentScores(self.tools.tokenizer, self.params)
        self._output = OutputItems(self.event)

    @property
    def said(self) -> list[dict[str, Any]]:
        """The input as chat templates read it, without the instructions."""
        given = self.body.input
        if isinstance(given, str):
            return [{"role": "user", "content": given}]
        return template_messages(given)

    def jobs(self, _: Service) -> list[Job]:
        said = self.body.instructions
        start = [{"role": "system", "content": said}] if said else []
        return [Job(self.tools.prompt([*start, *self.said]), self.params)]

    def reply(self, completion: Completion) -> ResponseReply:
        (sample,) = completion.samples
        piece = Piece(
            text=sample.text,
            token_ids=sample.token_ids,
            finish_reason=sample.finish_reason,
            logprobs=sample.logprobs,
            reasoning=sample.reasoning or "",
            num_reasoning=sample.num_reasoning_tokens,
            num_cached_tokens=completion.num_cached_tokens,
        )
        list(self.added(piece))
        reply = self.ended(piece.finish_reason, len(completion.prompt_token_ids))
        return reply.model_copy(update={"predicted_tokens": completion.predicted_tokens})

    def added(self, piece: Piece) -> Iterator[ResponseEvent]:
        """Add a piece to the output, and yield its events; the last one closes the output."""
        reason = piece.finish_reason
        self._num_output += len(piece.token_ids)
        self._num_reasoning += piece.num_reasoning
        self._num_cached = piece.num_cached_tokens
        if piece.reasoning:
            yield from self._output.reasoning(piece.reasoning)
        parts = self._answered.push(piece.text, reason)
        scored: list[ScoredChoice] = []
        if piece.logprobs is not None:
            has_content = bool(piece.text) or reason is not None
            scored = self._scores.add(piece.logprobs, piece.num_reasoning, has_content=has_content)
        is_empty = reason is not None and self._output.is_empty
        if not parts and (is_empty or (scored and not self.tools.is_given)):
            parts = [""]
        for part in parts:
            if isinstance(part, str):
                yield from self._output.text(part, scored)
                scored = []
            else:
                yield from self._output.call(part)
        if reason is not None:
            yield from self._output.close(_status(reason))

    def _format(self) -> dict[str, Any]:
        text = self.body.text
        if text is None or text.format is None:
            return {"type": "text"}
        return text.format.model_dump(by_alias=True, exclude_none=True)

    def event(self, kind: str, **fields: Any) -> ResponseEvent:
        return ResponseEvent(type=kind, sequence_number=next(self._numbers), **fields)

    def ended(self, finish_reason: str | None, num_prompt: int) -> ResponseReply:
        usage = ResponseUsage(
            input_tokens=num_prompt,
            input_tokens_details=CachedTokens(cached_tokens=self._num_cached),
            output_tokens=self._num_output,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self._num_reasoning),
            total_tokens=num_prompt + self._num_output,
        )
        return self.so_far(_status(finish_reason), self._output.items, usage)

    def so_far(
        self,
        status: Any,
        output: list[OutputItem] | None = None,
        usage: ResponseUsage | None = None,
    ) -> ResponseReply:
        body = self.body
        choice = body.tool_choice or "auto"
        return ResponseReply(
            id=self.id,
            created_at=self.created_at,
            status=status,
            incomplete_details=Incomplete() if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self.model,
            output=output or [],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=self.params.temperature,
            text={"format": self._format()},
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[tool.model_dump() for tool in body.tools or ()],
            top_p=self.params.top_p,
            usage=usage,
            user=body.user,
            metadata=body.metadata or {},
            conversation=None if self.conversation_id is None else {"id": self.conversation_id},
        )


@final
class ResponseEvents:
    """The events of a streamed response; `num_prompt_tokens` is known at the end."""

    def __init__(
        self, answer: ResponseAnswer, lengths: LengthComments, num_prompt_tokens: Callable[[], int]
    ):
        self._answer = answer
        self._num_prompt_tokens = num_prompt_tokens
        self._lengths = lengths
        self._reason: str | None = None

    def begin(self) -> bytes:
        answer = self._answer
        return b"".join(
            _data(answer.event(kind, response=answer.so_far("in_progress")))
            for kind in ("response.created", "response.in_progress")
        )

    def of(self, group: Group) -> bytes:
        told = self._lengths.of((0, piece) for _, piece in group)
        return told + b"".join(_data(event) for _, piece in group for event in self._of(piece))

    def end(self) -> bytes:
        reply = self._answer.ended(self._reason, self._num_prompt_tokens())
        reply = reply.model_copy(update={"predicted_tokens": self._lengths.predicted.get(0)})
        return _data(self._answer.event(f"response.{reply.status}", response=reply))

    def _of(self, piece: Piece) -> Iterator[ResponseEvent]:
        self._reason = piece.finish_reason or self._reason
        return self._answer.added(piece)


def _data(event: ResponseEvent) -> bytes:
    if event.delta is None or event.logprobs:
        return event_of(event, event.type)
    content = "" if event.content_index is None else f'"content_index":{event.content_index},'
    scored = "" if event.logprobs is None else ',"logprobs":[]'
    data = (
        f'{{"type":"{event.type}","sequence_number":{event.sequence_number},'
        f'"output_index":{event.output_index},{content}"item_id":"{event.item_id}",'
        f'"delta":{compact(event.delta)}{scored}}}'
    )
    return format_sse_event(event=event.type, data_str=data)


def _status(finish_reason: str | None) -> Literal["completed", "incomplete"]:
    return "incomplete" if finish_reason == "length" else "completed"
