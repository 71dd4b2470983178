"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, cast, final

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.request import Completion, Sample
from jaxserve.core.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxserve.engine.answers import Piece
from jaxserve.runtime import Service
from jaxserve.server.errors import invalid
from jaxserve.server.events import (
    ChoiceEvent,
    EventStream,
    LengthComments,
    compact,
    event_of,
    json_response,
    unless_gone,
)
from jaxserve.server.exchange import Exchange, Group, Job
from jaxserve.server.params import check_streaming, constraint_of, of_format, sampling_params
from jaxserve.server.routes.common import (
    ANSWERING,
    Here,
    InClass,
    check_fields,
    check_num_samples,
    documented,
    is_short,
    need_tokenizer,
    new_id,
    now_s,
    replied,
)
from jaxserve.server.schema import (
    MAX_INT32,
    NONE_IF_EMPTY,
    AnswerMessage,
    Asking,
    ConversationId,
    Delta,
    FinishReason,
    Items,
    Logprobs,
    Message,
    NoEffect,
    PromptLogprobs,
    Reply,
    ResponseFormat,
    ScoredChoice,
    Tool,
    ToolChoice,
    Usage,
    as_template_message,
    optional,
    predicted,
    unused,
)
from jaxserve.server.scores import ContentScores, LogprobFormatter
from jaxserve.server.thinking import Effort, ThinkingFields, template_variables
from jaxserve.server.tools import Tools, deltas, whole
from jaxserve.server.turn import Relay, TurnExchange


class ChatRequest(Asking, ThinkingFields):
    """A chat, and how its next message is generated."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    max_tokens: int | None = Field(
        None, ge=1, le=MAX_INT32, description="The former name of max_completion_tokens."
    )
    response_format: ResponseFormat | None = None
    tools: Annotated[Items[Tool], Field(max_length=128), NONE_IF_EMPTY] | None = None
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
    prediction: NoEffect = Field(None, description="It would only save time.")
    verbosity: NoEffect = Field(None, description="Ignored.")
    audio: None = unused()
    function_call: None = unused()
    functions: None = unused()
    moderation: None = unused()
    reasoning_effort: Effort | None = Field(
        None,
        description='For chat templates that read it. "none" switches thinking off and others '
        "switch it on, where the template has a switch.",
    )
    web_search_options: None = unused()


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
    """One event of an answer with usage, which is null except in the last event."""

    usage: Usage | None = None


router = APIRouter()

# Fields of vLLM that say what the answer has to match.
_VLLM = ("structured_outputs", "guided_json", "guided_regex", "guided_grammar", "guided_choice")


@router.post(
    "/v1/chat/completions",
    response_model=ChatReply,
    responses=documented(*ANSWERING, stream=True),
    tags=["answers"],
)
async def chat(body: ChatRequest, http: Request, backend: Here, own: InClass) -> Response:
    """Answer a chat."""
    adapter = backend.adapter_of(body.model)
    check_fields(body, backend)
    tokenizer = need_tokenizer(backend.ready_service())
    variables = template_variables(
        tokenizer,
        backend.options.template_kwargs,
        body.chat_template_kwargs,
        effort=body.reasoning_effort,
        enable_thinking=body.enable_thinking,
        has_tools=body.tools is not None,
    )
    tools = Tools(body.tools, body.tool_choice, body.parallel_tool_calls, tokenizer, variables)
    params = own.apply(replace(_params(body, tools), adapter=adapter, tenant=body.user or None))
    answer = ChatAnswer(body, params, tools, adapter or backend.options.model_name)
    if body.conversation_id is not None:
        return await _turn(body, body.conversation_id, answer, http, backend)
    check_num_samples(params.n, backend)
    exchange = Exchange(backend, answer.id, at_once=is_short(http, backend, answer.params))
    if body.stream:
        lengths = LengthComments(answer.params.max_tokens, backend.metrics.pace_s)
        events = ChatChunks(answer, lengths, lambda: exchange.jobs[0].prompt)
        return EventStream(exchange.stream(answer.jobs), events, exchange.close)
    return await replied(http, exchange, answer)


def _params(body: ChatRequest, tools: Tools) -> SamplingParams:
    """Return the sampling parameters of a chat; `tools` may have a grammar."""
    check_streaming(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
    given = (body.max_completion_tokens, body.max_tokens)
    if None not in given and given[0] != given[1]:
        raise invalid(
            f"max_completion_tokens={given[0]} and max_tokens={given[1]} contradict each other; "
            "pass max_completion_tokens only",
            "max_tokens",
        )
    most = given[1] if given[0] is None else given[0]
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    constraint = constraint_of(body.response_format, tools)
    _check_one_constraint(body, constraint)
    if tools.is_given and body.skip_special_tokens:
        raise invalid(
            "skip_special_tokens=true and tools exclude each other, since calls may be marked by "
            "special tokens; leave skip_special_tokens out",
            "skip_special_tokens",
        )
    others = {**constraint, **body.thinking_params}
    return sampling_params(body, max_tokens=most, n=body.n or 1, logprobs=logprobs, **others)


def _check_one_constraint(body: ChatRequest, constraint: Mapping[str, Any]) -> None:
    """Check that only one of vLLM's fields, the format and the tools constrains the answer."""
    own = next((name for name in _VLLM if getattr(body, name) is not None), None)
    given = constraint.keys() - {"skip_special_tokens"}
    if own is None or not given:
        return
    other = "response_format" if of_format(body.response_format) else "tool_choice"
    raise invalid(
        f"{own} and {other} both say what the answer has to match; leave one of them out", own
    )


async def _turn(
    body: ChatRequest, id: str, answer: ChatAnswer, http: Request, backend: Here
) -> Response:
    """Answer the next turn of a conversation that the service keeps."""
    for name in ("priority", "return_token_ids") if body.stream else ("priority",):
        if getattr(body, name) is not None:
            raise invalid(f"{name} cannot be used with conversation_id; leave it out", name)
    said = [as_template_message(message) for message in body.messages]
    exchange = TurnExchange(backend, id, said, answer.params, answer.tools)
    if not body.stream:
        return json_response(answer.reply(await unless_gone(http.receive, exchange.completion())))
    relay = Relay(exchange.pieces())
    lengths = LengthComments(answer.params.max_tokens, backend.metrics.pace_s)
    events = ChatChunks(answer, lengths, None, lambda: exchange.num_prompt_tokens)
    return EventStream(relay.groups(), events, relay.close)


@final
@dataclass
class ChatAnswer:
    body: ChatRequest
    params: SamplingParams
    tools: Tools
    model: str

    def __post_init__(self) -> None:
        self.id = new_id("chatcmpl")
        self.created = now_s()
        self.answered = [self.tools.reader() for _ in range(self.params.n)]
        num_scored = 0 if self.params.logprobs is None else self.params.n
        self.scores = [ContentScores(self.tools.tokenizer, self.params) for _ in range(num_scored)]

    @property
    def service_tier(self) -> Literal["default"] | None:
        """The tier of the answer, if the request names one."""
        return None if self.body.service_tier is None else "default"

    def jobs(self, _: Service) -> list[Job]:
        messages = [as_template_message(message) for message in self.body.messages]
        return [Job(self.tools.prompt(messages), self.params, self.body.priority or 0)]

    def reply(self, completion: Completion) -> ChatReply:
        choices = [self._whole(i, sample) for i, sample in enumerate(completion.samples)]
        prompt = completion.prompt_token_ids
        return ChatReply(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=Usage.of(
                len(prompt),
                sum(len(sample.token_ids) for sample in completion.samples),
                completion.num_cached_tokens,
                sum(sample.num_reasoning_tokens for sample in completion.samples),
            ),
            prompt_logprobs=None
            if completion.prompt_logprobs is None
            else LogprobFormatter(self.tools.tokenizer, after=()).of_prompt(
                completion.prompt_logprobs, prompt
            ),
            prompt_token_ids=list(prompt) if self.body.return_token_ids else None,
            conversation_id=self.body.conversation_id,
            service_tier=self.service_tier,
            predicted_tokens=completion.predicted_tokens,
        )

    def _whole(self, index: int, sample: Sample) -> ChatChoice:
        answered = self.answered[index]
        message = whole(answered.push(sample.text, sample.finish_reason))
        message.reasoning_content = message.reasoning = sample.reasoning
        return ChatChoice(
            index=index,
            message=message,
            logprobs=None
            if sample.logprobs is None
            else Logprobs(
                content=self.scores[index].add(
                    sample.logprobs, sample.num_reasoning_tokens, has_content=True
                )
            ),
            finish_reason=cast(FinishReason, answered.finish_reason(sample.finish_reason)),
            token_ids=list(sample.token_ids) if self.body.return_token_ids else None,
        )


@final
class ChatChunks:
    """The events of a streamed chat: chunks.

    `prompt` returns the prompt's tokens, after the first piece; None if they are unknown. Then
    `num_prompt_tokens` returns their number at the end.
    """

    def __init__(
        self,
        answer: ChatAnswer,
        lengths: LengthComments,
        prompt: Callable[[], list[int]] | None,
        num_prompt_tokens: Callable[[], int] = lambda: 0,
    ):
        self._answer = answer
        self._prompt = prompt
        self._num_prompt_tokens = num_prompt_tokens
        options = answer.body.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._with_ids = bool(answer.body.return_token_ids)
        self._lengths = lengths
        self._begun: set[int] = set()
        self._num_tokens = self._num_cached = self._num_reasoning = 0
        self._event = ChoiceEvent(self._chunk())

    def begin(self) -> bytes:
        """Return nothing: a choice's first event comes with its first piece."""
        return b""

    def of(self, group: Group) -> bytes:
        told = self._lengths.of((piece.sample_index, piece) for _, piece in group)
        return told + b"".join(self._of(piece) for _, piece in group)

    def end(self) -> bytes:
        """Return the chunk of the usage, if it was asked for."""
        if not self._with_usage:
            return b""
        num_prompt = len(self._prompt()) if self._prompt else self._num_prompt_tokens()
        usage = Usage.of(num_prompt, self._num_tokens, self._num_cached, self._num_reasoning)
        return event_of(self._chunk(usage=usage))

    def _of(self, piece: Piece) -> bytes:
        self._num_tokens += len(piece.token_ids)
        self._num_reasoning += piece.num_reasoning
        index, is_first = piece.sample_index, piece.sample_index not in self._begun
        if not index:
            self._num_cached = piece.num_cached_tokens
        is_call = False
        is_plain = not self._with_ids and piece.logprobs is None
        if is_plain and piece.reasoning and not (piece.text or piece.finish_reason):
            choices = [_thought(piece)]
        elif (
            is_plain
            and not (self._answer.tools.is_given or piece.reasoning)
            and (piece.text or not piece.finish_reason)
        ):
            choices = [_plain(piece)]
        else:
            found = self._choices(piece)
            choices = [choice.model_dump_json() for choice in found]
            is_call = bool(found and found[0].delta.tool_calls)
        events = [self._event.of(choice) for choice in choices]
        if is_first and events:
            self._begun.add(index)
            events.insert(0, self._first_event(_role(index, is_call=is_call)))
        return b"".join(events)

    def _first_event(self, choice: str) -> bytes:
        if not (self._with_ids and self._prompt):
            return self._event.of(choice)
        return ChoiceEvent(self._chunk(prompt_token_ids=self._prompt())).of(choice)

    def _choices(self, piece: Piece) -> list[ChunkChoice]:
        """Return what a piece adds, one choice per chunk; none if all of it is held back."""
        answer, reason = self._answer, piece.finish_reason
        index = piece.sample_index
        answered, has_tools = answer.answered[index], answer.tools.is_given
        found = deltas(answered.push(piece.text, reason))
        scored: list[ScoredChoice] = []
        if piece.logprobs is not None:
            has_content = bool(piece.text) or reason is not None
            scored = answer.scores[index].add(
                piece.logprobs, piece.num_reasoning, has_content=has_content
            )
        place = 0  # of what has the scores
        if piece.reasoning:
            thought = Delta(reasoning_content=piece.reasoning, reasoning=piece.reasoning)
            place = min(1, len(found))
            found.insert(0, thought)
        if not found and (reason or scored or self._with_ids or not has_tools):
            found = [Delta(content=None if reason or has_tools else "")]
        ended = cast(FinishReason, reason and answered.finish_reason(reason))
        token_ids = list(piece.token_ids) if self._with_ids else None
        last = len(found) - 1
        return [
            ChunkChoice(
                index=index,
                delta=delta,
                logprobs=Logprobs(content=scored) if scored and i == place else None,
                finish_reason=ended if i == last else None,
                token_ids=None if i else token_ids,
            )
            for i, delta in enumerate(found)
        ]

    def _chunk(
        self, usage: Usage | None = None, prompt_token_ids: list[int] | None = None
    ) -> ChatChunk:
        answer = self._answer
        return (CountedChatChunk if self._with_usage else ChatChunk)(
            id=answer.id,
            created=answer.created,
            model=answer.model,
            choices=[],
            usage=usage,
            service_tier=answer.service_tier,
            prompt_token_ids=prompt_token_ids,
        )


def _plain(piece: Piece) -> str:
    """Return the JSON of a `ChunkChoice` that has text only."""
    return _bare(piece.sample_index, f'"content":{compact(piece.text)}', piece.finish_reason)


def _thought(piece: Piece) -> str:
    """Return the JSON of a `ChunkChoice` that has thinking only."""
    text = compact(piece.reasoning)
    return _bare(piece.sample_index, f'"reasoning_content":{text},"reasoning":{text}')


def _bare(index: int, delta: str, finish_reason: str | None = None) -> str:
    reason = "null" if finish_reason is None else compact(finish_reason)
    return f'{{"index":{index},"delta":{{{delta}}},"logprobs":null,"finish_reason":{reason}}}'


def _role(index: int, *, is_call: bool) -> str:
    """Return the choice before a sample's first one; it has no content if a call begins it."""
    return _bare(index, '"role":"assistant"' if is_call else '"role":"assistant","content":""')
