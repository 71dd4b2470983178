"""`/v1/messages` and `/v1/messages/count_tokens`: chats in the form of Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated, Any, Literal, final

from anyio import to_thread
from fastapi import APIRouter
from fastapi.sse import format_sse_event
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import MAX_STOPS, SamplingParams
from jaxserve.engine.answers import Piece
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.runtime import Service
from jaxserve.server.backend import Backend
from jaxserve.server.errors import invalid
from jaxserve.server.events import EventStream, LengthComments, compact, event_of, json_response
from jaxserve.server.exchange import Exchange, Group, Job
from jaxserve.server.guard import note, notes_here
from jaxserve.server.params import constraint_of
from jaxserve.server.routes.common import (
    ANSWERING,
    READING,
    Here,
    InClass,
    check_ignored,
    documented,
    is_short,
    need_tokenizer,
    new_id,
    replied,
)
from jaxserve.server.schema import (
    MAX_INT32,
    AddedCall,
    Function,
    Items,
    JsonObject,
    MessagesErrorReply,
    NamedFunction,
    NamedTool,
    NoEffect,
    Reply,
    StopText,
    Strict,
    Tool,
    checked_json,
    no_effect,
    optional,
    predicted,
    unused,
)
from jaxserve.server.thinking import template_variables
from jaxserve.server.tools import Tools

router = APIRouter()

# Tokens of a character at most: its bytes.
_MAX_CHARACTER_TOKENS = 4


class TextBlock(Strict):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: NoEffect = no_effect("prefixes are cached in any case.")
    citations: Annotated[list[Any], Field(max_length=0)] | None = None
    parsed_output: NoEffect = no_effect("what Anthropic's client reads in `text`.")


class ToolUseBlock(Strict):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject
    cache_control: NoEffect = no_effect("prefixes are cached in any case.")
    caller: NoEffect = no_effect("the model.")
    toolset_name: None = unused()


class ToolResultBlock(Strict):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[TextBlock] | None = None
    is_error: NoEffect = no_effect("chat templates have results only.")
    cache_control: NoEffect = no_effect("prefixes are cached in any case.")
    toolset_name: None = unused()


class ThinkingBlock(Strict):
    """What the model thought before an earlier answer; rendered as the chat template wants."""

    type: Literal["thinking"]
    thinking: str
    signature: NoEffect = no_effect("nothing is signed.")


class RedactedThinkingBlock(Strict):
    """What another service thought, which only it can read; the prompt does not have it."""

    type: Literal["redacted_thinking"]
    data: str


class SystemTurn(Strict):
    """What the answers from here on have to obey."""

    role: Literal["system"]
    content: str | Items[TextBlock]


class UserTurn(Strict):
    """What the user says, and results of calls."""

    role: Literal["user"]
    content: str | Items[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]]


AnswerBlock = TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock


class AssistantTurn(Strict):
    """An earlier answer, as this server gave it."""

    role: Literal["assistant"]
    content: str | Items[Annotated[AnswerBlock, Field(discriminator="type")]]


Turn = Annotated[SystemTurn | UserTurn | AssistantTurn, Field(discriminator="role")]


class ClientTool(Strict):
    """A tool that the client runs; the server has none of its own."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=128, pattern="^[a-zA-Z0-9_.-]+$")]
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = Field(None, description="Enforced where a call is demanded.")
    cache_control: NoEffect = no_effect("prefixes are cached in any case.")
    eager_input_streaming: NoEffect = no_effect("arguments are always streamed as they come.")
    allowed_callers: Items[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    input_examples: None = unused()


class ChoiceOfTools(Strict):
    """Whether tools may be called (auto), must be (any), or may not be (none)."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class ChoiceOfOneTool(Strict):
    """The tool that has to be called."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class NoThinking(Strict):
    """Switches thinking off, where the chat template has a switch."""

    type: Literal["disabled"]


class AdaptiveThinking(Strict):
    """Leaves it to the chat template and the model whether they think."""

    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = Field(
        None, description='"omitted" leaves the text out of thinking blocks; no summary is made.'
    )


class ThinkingEnabled(Strict):
    """Switches thinking on, where the chat template has a switch."""

    type: Literal["enabled"]
    budget_tokens: int = Field(
        ge=1, le=MAX_INT32, description="The end of thinking is written after this many."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description='"omitted" leaves the text out of thinking blocks; no summary is made.'
    )


class JsonFormat(Strict):
    """JSON that validates."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")

    @property
    def given_schema(self) -> JsonObject:
        return self.schema_


class OutputConfig(Strict):
    """The form of the answer."""

    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For chat templates that read it."
    )


class Metadata(Strict):
    """Who asks."""

    user_id: str | None = Field(
        None, description="Written to the access log; policy vtc serves all users equally."
    )


class CountRequest(Strict):
    """The parts of a prompt."""

    messages: Annotated[Items[Turn], Field(min_length=1)]
    model: str | None = None
    system: str | Items[TextBlock] | None = None
    tools: Annotated[Items[ClientTool], Field(max_length=128)] | None = None
    tool_choice: Annotated[ChoiceOfTools | ChoiceOfOneTool, Field(discriminator="type")] | None = (
        Field(None, description="auto by default.")
    )
    thinking: (
        Annotated[NoThinking | AdaptiveThinking | ThinkingEnabled, Field(discriminator="type")]
        | None
    ) = Field(None, description="adaptive by default.")
    output_config: OutputConfig | None = None
    cache_control: NoEffect = no_effect("prefixes are cached in any case.")
    context_management: NoEffect = Field(None, description="Nothing is cleared from the prompt.")
    speed: Literal["standard"] | None = None


class MessagesRequest(CountRequest):
    """A chat, and how its next message is generated."""

    max_tokens: int = Field(ge=1, le=MAX_INT32)
    stop_sequences: Annotated[Items[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_INT32, description="0 keeps all tokens.")
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(
        None, description="There is only one tier."
    )
    container: None = unused()
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None


class CountReply(Reply):
    """The number of tokens of the prompt."""

    input_tokens: int


class AnsweredText(Reply):
    """A text of the answer."""

    type: Literal["text"] = "text"
    text: str


class AnsweredToolUse(Reply):
    """A call of a tool in the answer."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class AnsweredThinking(Reply):
    """What the model thought; nothing is signed."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


Block = AnsweredText | AnsweredToolUse | AnsweredThinking
StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessagesTokensDetails(Reply):
    """Parts of the output."""

    thinking_tokens: int


class MessagesUsage(Reply):
    """Numbers of tokens; `input_tokens` are without those whose KV was cached."""

    input_tokens: int
    cache_creation_input_tokens: int | None = optional()
    cache_read_input_tokens: int | None = optional()
    output_tokens: int
    output_tokens_details: MessagesTokensDetails | None = optional("Of an answer with thinking.")

    @classmethod
    def of(
        cls, num_prompt: int, num_cached: int, num_output: int, num_thinking: int
    ) -> MessagesUsage:
        details = MessagesTokensDetails(thinking_tokens=num_thinking)
        return cls(
            output_tokens_details=details if num_thinking else None,
            input_tokens=num_prompt - num_cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=num_cached,
            output_tokens=num_output,
        )


class MessagesReply(Reply):
    """The answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    predicted_tokens: int | None = predicted()


class StopDelta(Reply):
    """Why the answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessagesEvent(Reply):
    """One event of a streamed answer; which fields it has depends on its type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: MessagesReply | None = optional()
    index: int | None = optional()
    content_block: Block | None = optional()
    delta: StopDelta | None = optional()
    usage: MessagesUsage | None = optional()


def _data(type: str, **fields: Any) -> bytes:
    event = MessagesEvent.model_validate({"type": type, **fields})
    return event_of(event, type)


def _delta(index: int, type: str, field: str, text: str) -> bytes:
    """Return the event of a part of a block: hundreds in an answer, so none is checked."""
    data = (
        f'{{"type":"content_block_delta","index":{index},'
        f'"delta":{{"type":"{type}","{field}":{compact(text)}}}}}'
    )
    return format_sse_event(event="content_block_delta", data_str=data)


# Sent while the client waits.
PING = format_sse_event(event="ping", data_str='{"type":"ping"}')


@final
class AnswerBlocks:
    """The blocks of one answer, one after the other; `blocks` are the complete ones.

    A call whose arguments are cut off is an event of a stream, and not one of `blocks`.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._index = -1  # of the open block, or of the last one
        self._open: Block | None = None  # as it began
        self._texts: list[str] = []

    def think(self, text: str) -> Iterator[bytes]:
        """Add to the open block of thinking, or begin one."""
        if not isinstance(self._open, AnsweredThinking):
            yield from self._begin(AnsweredThinking(thinking=""))
        if text:
            yield self._added("thinking_delta", "thinking", text)

    def add(self, part: str | AddedCall) -> Iterator[bytes]:
        """Add to the open block, or begin another one."""
        if isinstance(part, str):
            if not isinstance(self._open, AnsweredText):
                yield from self._begin(AnsweredText(text=""))
            yield self._added("text_delta", "text", part)
            return
        if part.id is not None:
            name = part.function.name or ""
            yield from self._begin(AnsweredToolUse(id=part.id, name=name, input={}))
        if part.function.arguments:
            yield self._added("input_json_delta", "partial_json", part.function.arguments)

    def close(self) -> Iterator[bytes]:
        """End the open block, if there is one."""
        block, text = self._open, "".join(self._texts)
        if block is None:
            return
        self._open = None
        if isinstance(block, AnsweredText):
            self.blocks.append(AnsweredText(text=text))
        elif isinstance(block, AnsweredThinking):
            self.blocks.append(AnsweredThinking(thinking=text))
            yield _delta(self._index, "signature_delta", "signature", "")
        elif (given := _object_of(text)) is not None:
            self.blocks.append(block.model_copy(update={"input": given}))
        yield _data("content_block_stop", index=self._index)

    def _begin(self, block: Block) -> Iterator[bytes]:
        yield from self.close()
        self._index, self._open, self._texts = self._index + 1, block, []
        yield _data("content_block_start", index=self._index, content_block=block)

    def _added(self, type: str, field: str, text: str) -> bytes:
        self._texts.append(text)
        return _delta(self._index, type, field, text)


def _object_of(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call; None if they are cut off."""
    try:
        found = checked_json([json.loads(text)])[0]
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@router.post(
    "/v1/messages",
    response_model=MessagesReply,
    responses=documented(*ANSWERING, stream=True, error=MessagesErrorReply),
    tags=["answers"],
)
async def answer_messages(
    body: MessagesRequest, http: Request, backend: Here, own: InClass
) -> Response:
    """Answer a chat, in the form of Anthropic's API."""
    adapter = backend.adapter_of(body.model)
    check_ignored(body, backend)
    user = None if body.metadata is None else body.metadata.user_id
    note(notes_here(), user=user)
    tokenizer = need_tokenizer(backend.ready_service())
    tools = _tools(body, tokenizer, backend)
    params = own.apply(replace(_params(body, tools), adapter=adapter, tenant=user or None))
    answer = MessagesAnswer(body, params, tools, adapter or backend.options.model_name)
    exchange = Exchange(backend, answer.id, at_once=is_short(http, backend, params))
    if not body.stream:
        return await replied(http, exchange, answer)
    lengths = LengthComments(params.max_tokens, backend.metrics.pace_s)
    events = MessagesEvents(
        answer, lengths, lambda: len(exchange.jobs[0].prompt) if exchange.jobs else 0
    )
    return EventStream(
        exchange.stream(answer.jobs),
        events,
        exchange.close,
        last=b"",
        error_event="error",
        waiting=PING,
    )


@router.post(
    "/v1/messages/count_tokens",
    response_model=CountReply,
    responses=documented(*READING, error=MessagesErrorReply),
    tags=["tokens"],
)
async def count_tokens(body: CountRequest, backend: Here) -> Response:
    """Return the number of tokens of a prompt in the form of Anthropic's API."""
    backend.adapter_of(body.model)
    check_ignored(body, backend)
    tools = _tools(body, need_tokenizer(backend.ready_service()), backend)
    prompt = await to_thread.run_sync(lambda: tools.prompt(messages_of(body)))
    return json_response(CountReply(input_tokens=len(prompt)))


def _tools(body: CountRequest, tokenizer: Tokenizer, backend: Backend) -> Tools:
    thinks = {"disabled": False, "enabled": True, "adaptive": None}
    variables = template_variables(
        tokenizer,
        backend.options.template_kwargs,
        None,
        effort=None if body.output_config is None else body.output_config.effort,
        enable_thinking=None if body.thinking is None else thinks[body.thinking.type],
        has_tools=bool(body.tools),
    )
    given = body.tool_choice
    choice: Any = None
    if isinstance(given, ChoiceOfOneTool):
        choice = NamedTool(type="function", function=NamedFunction(name=given.name))
    elif given is not None:
        choice = {"auto": "auto", "any": "required", "none": "none"}[given.type]
    is_one = given is not None and given.disable_parallel_tool_use
    if not body.tools:
        return Tools(None, None if choice == "auto" else choice, None, tokenizer, variables)
    tools = [_tool(tool) for tool in body.tools]
    return Tools(tools, choice, False if is_one else None, tokenizer, variables)


def _tool(given: ClientTool) -> Tool:
    function = Function(
        name=given.name,
        description=given.description,
        parameters=given.input_schema,
        strict=given.strict,
    )
    return Tool(type="function", function=function)


def _params(body: MessagesRequest, tools: Tools) -> SamplingParams:
    form = None if body.output_config is None else body.output_config.format
    return SamplingParams(
        max_tokens=body.max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        stop=tuple(body.stop_sequences or ()),
        separate_reasoning=True,
        max_thinking_tokens=(
            body.thinking.budget_tokens if isinstance(body.thinking, ThinkingEnabled) else None
        ),
        **constraint_of(form, tools),
    )


def messages_of(body: CountRequest) -> list[dict[str, Any]]:
    """Return the chat as templates read it; turns of one role after another are one message."""
    if body.messages[-1].role == "assistant":
        raise invalid(
            "the last message is the assistant's, and an answer cannot be begun for the model; "
            "end with a message of the user, or pass output_config.format",
            "messages",
        )
    system = _text(body.system)
    found = [{"role": "system", "content": system}] if system else []
    for role, turns in groupby(body.messages, lambda turn: turn.role):
        messages = [message for turn in turns for message in _of_turn(turn)]
        if role == "assistant":
            found.append(_joined(messages))
        else:
            for is_result, adjacent in groupby(messages, lambda each: each["role"] == "tool"):
                each = list(adjacent)
                found += each if is_result else [_joined(each)]
    return found


def _of_turn(turn: SystemTurn | UserTurn | AssistantTurn) -> list[dict[str, Any]]:
    """Return the messages of a turn: results of calls are messages of their own."""
    content = turn.content
    if isinstance(content, str):
        return [{"role": turn.role, "content": content}]
    found: list[dict[str, Any]] = []
    for is_result, blocks in groupby(content, lambda block: isinstance(block, ToolResultBlock)):
        if is_result:
            found += [
                {"role": "tool", "content": _text(block.content), "tool_call_id": block.tool_use_id}
                for block in blocks
                if isinstance(block, ToolResultBlock)
            ]
        else:
            found.append(_message(turn.role, list(blocks)))
    return found or [{"role": turn.role, "content": ""}]


def _message(role: str, blocks: Sequence[Any]) -> dict[str, Any]:
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {
                "name": block.name,
                "arguments": json.dumps(block.input, ensure_ascii=False),
            },
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    content = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    return {
        "role": role,
        "content": content,
        **({"reasoning_content": thought} if thought else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _joined(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return messages of one role as one, with an empty line between their texts."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    content = "\n\n".join(text for message in messages if (text := message["content"]))
    thought = "".join(message.get("reasoning_content", "") for message in messages)
    return {
        "role": messages[0]["role"],
        "content": content,
        **({"reasoning_content": thought} if thought else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _text(content: str | Sequence[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.text for block in content)


@final
@dataclass
class MessagesAnswer:
    body: MessagesRequest
    params: SamplingParams
    tools: Tools
    model: str

    def __post_init__(self) -> None:
        self.id = new_id("msg")
        self._answered = self.tools.reader()
        self._blocks = AnswerBlocks()

    def jobs(self, _: Service) -> list[Job]:
        return [Job(self.tools.prompt(messages_of(self.body)), self.params)]

    def reply(self, completion: Completion) -> MessagesReply:
        (sample,) = completion.samples
        for _ in self.added(sample.reasoning or "", sample.text, sample.finish_reason):
            pass
        end = self.stop(completion.finish_reason, completion.token_ids)
        usage = MessagesUsage.of(
            len(completion.prompt_token_ids),
            completion.num_cached_tokens,
            len(completion.token_ids),
            sample.num_reasoning_tokens,
        )
        return MessagesReply(
            id=self.id,
            model=self.model,
            content=self._blocks.blocks,
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            usage=usage,
            predicted_tokens=completion.predicted_tokens,
        )

    def begun(self, num_prompt_tokens: int) -> MessagesReply:
        return MessagesReply(
            id=self.id,
            model=self.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=MessagesUsage(input_tokens=num_prompt_tokens, output_tokens=0),
        )

    def added(self, thought: str, text: str, reason: str | None) -> Iterator[bytes]:
        """Add a piece to the blocks, and yield its events; the last one closes the blocks."""
        if thought:
            given = self.body.thinking
            is_switch = given is None or isinstance(given, NoThinking)
            is_shown = is_switch or given.display != "omitted"
            yield from self._blocks.think(thought if is_shown else "")
        for part in self._answered.push(text, reason):
            yield from self._blocks.add(part)
        if reason is not None:
            yield from self._blocks.close()

    def stop(self, reason: str, token_ids: Sequence[int]) -> StopDelta:
        """Return why the answer ended, which has these tokens."""
        if reason == "length":
            is_at_limit = len(token_ids) >= self.body.max_tokens
            why: StopReason = "max_tokens" if is_at_limit else "model_context_window_exceeded"
            return StopDelta(stop_reason=why, stop_sequence=None)
        if self._answered.finish_reason(reason) == "tool_calls":
            return StopDelta(stop_reason="tool_use", stop_sequence=None)
        stop = self._stop_sequence(token_ids)
        why = "end_turn" if stop is None else "stop_sequence"
        return StopDelta(stop_reason=why, stop_sequence=stop)

    def _stop_sequence(self, token_ids: Sequence[int]) -> str | None:
        """Return the stop string that the last token completed; the first, if there are several."""
        stops = self.body.stop_sequences
        if not stops:
            return None
        last = token_ids[-_MAX_CHARACTER_TOKENS * max(map(len, stops)) - 1 :]
        text = self.tools.tokenizer.decode(last, False)
        # Of a character that the last token completes, the tokens before it are U+FFFD.
        num_before = len(self.tools.tokenizer.decode(last[:-1], False).rstrip("\ufffd"))
        places = {
            stop: at
            for stop in stops
            if (at := text.find(stop, max(0, num_before - len(stop) + 1))) >= 0
        }
        return min(places, key=lambda stop: places[stop]) if places else None


@final
class MessagesEvents:
    """The events of a streamed answer.

    The first event has the number of tokens of the prompt (0 while a long one is tokenized), the
    last one has also how many of them were cached.
    """

    def __init__(
        self, answer: MessagesAnswer, lengths: LengthComments, num_prompt_tokens: Callable[[], int]
    ):
        self._answer = answer
        self._num_prompt_tokens = num_prompt_tokens
        self._lengths = lengths
        self._reason = "stop"
        self._num_cached = self._num_thinking = 0
        self._tokens: list[int] = []

    def begin(self) -> bytes:
        return _data("message_start", message=self._answer.begun(self._num_prompt_tokens()))

    def of(self, group: Group) -> bytes:
        told = self._lengths.of((0, piece) for _, piece in group)
        return told + b"".join(event for _, piece in group for event in self._of(piece))

    def end(self) -> bytes:
        usage = MessagesUsage.of(
            self._num_prompt_tokens(), self._num_cached, len(self._tokens), self._num_thinking
        )
        delta = self._answer.stop(self._reason, self._tokens)
        return _data("message_delta", delta=delta, usage=usage) + _data("message_stop")

    def _of(self, piece: Piece) -> Iterator[bytes]:
        self._reason = piece.finish_reason or self._reason
        self._tokens += piece.token_ids
        self._num_cached = piece.num_cached_tokens
        self._num_thinking += piece.num_reasoning
        return self._answer.added(piece.reasoning or "", piece.text, piece.finish_reason)
