"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, cast, final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.request import Completion, Sample
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.runtime import Service
from jaxserve.server import params as params_of
from jaxserve.server.disconnects import unless_gone
from jaxserve.server.errors import invalid
from jaxserve.server.events import (
    ChoiceEvent,
    EventStream,
    comments,
    compact,
    event_of,
    json_response,
)
from jaxserve.server.exchange import Exchange, Group, Job
from jaxserve.server.guard import note, notes_here
from jaxserve.server.lengths import LengthComments
from jaxserve.server.relay import Relay
from jaxserve.server.routes.common import (
    ANSWERING,
    Here,
    InClass,
    check_num_samples,
    documented,
    is_short,
    need_tokenizer,
    new_id,
    now_s,
)
from jaxserve.server.schema.base import FinishReason, Usage
from jaxserve.server.schema.chat import (
    ChatChoice,
    ChatChunk,
    ChatReply,
    ChatRequest,
    ChunkChoice,
    CountedChatChunk,
    Delta,
    as_template_message,
)
from jaxserve.server.scores import TokenScores
from jaxserve.server.tools import Tools, deltas, whole
from jaxserve.server.turn import TurnExchange

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    response_model=ChatReply,
    responses=documented(*ANSWERING, stream=True),
    tags=["answers"],
)
async def chat(body: ChatRequest, http: Request, backend: Here, own: InClass) -> Response:
    """Answer a chat."""
    adapter = backend.adapter_of(body.model)
    note(notes_here(), user=body.user, safety_identifier=body.safety_identifier)
    tokenizer = need_tokenizer(backend.ready_service())
    tools = Tools(body.tools, body.tool_choice, body.parallel_tool_calls, tokenizer)
    params = own.apply(replace(params_of.of_chat(body, tools), adapter=adapter))
    answer = _Chat(body, params, tools, adapter or backend.options.model_name, tokenizer)
    if body.conversation_id is not None:
        return await _turn(body, body.conversation_id, answer, http, backend)
    check_num_samples(params.n, backend)
    exchange = Exchange(backend, answer.id, at_once=is_short(http, backend, answer.params))
    if body.stream:
        lengths = backend.length_comments(answer.params)
        events = _Chunks(answer, lengths, lambda: exchange.jobs[0].prompt)
        return EventStream(exchange.stream(answer.jobs), events, exchange.close)
    (completion,) = await unless_gone(http.receive, exchange.answer(answer.jobs))
    return json_response(answer.reply(completion))


async def _turn(
    body: ChatRequest, id: str, answer: _Chat, http: Request, backend: Here
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
    lengths = backend.length_comments(answer.params)
    events = _Chunks(answer, lengths, None, lambda: exchange.num_prompt_tokens)
    return EventStream(relay.groups(), events, relay.close)


@final
@dataclass
class _Chat:
    """The answer to one chat."""

    body: ChatRequest
    params: SamplingParams
    tools: Tools
    model: str
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        self.id = new_id("chatcmpl")
        self.created = now_s()
        self.answered = [self.tools.reader() for _ in range(self.params.n)]
        skip = self.params.skip_special_tokens
        num_scored = 0 if self.params.logprobs is None else self.params.n
        self.scores = [
            TokenScores(self.tokenizer, skip_special_tokens=skip) for _ in range(num_scored)
        ]

    @property
    def service_tier(self) -> Literal["default"] | None:
        """The tier of the answer, where the request names one."""
        return None if self.body.service_tier is None else "default"

    def jobs(self, _: Service) -> list[Job]:
        """Return the one prompt."""
        messages = [as_template_message(message) for message in self.body.messages]
        return [Job(self.tools.prompt(messages), self.params, self.body.priority or 0)]

    def reply(self, completion: Completion) -> ChatReply:
        """Return the whole answer."""
        choices = [self._whole(i, sample) for i, sample in enumerate(completion.samples)]
        prompt = completion.prompt_token_ids
        return ChatReply(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=Usage.of(len(prompt), sum(len(s.token_ids) for s in completion.samples)),
            prompt_logprobs=None
            if completion.prompt_logprobs is None
            else TokenScores(self.tokenizer, after=()).of_prompt(
                completion.prompt_logprobs, prompt
            ),
            prompt_token_ids=list(prompt) if self.body.return_token_ids else None,
            conversation_id=self.body.conversation_id,
            service_tier=self.service_tier,
            predicted_tokens=completion.predicted_tokens,
        )

    def _whole(self, index: int, sample: Sample) -> ChatChoice:
        answered = self.answered[index]
        return ChatChoice(
            index=index,
            message=whole(answered.push(sample.text, is_last=True)),
            logprobs=None
            if sample.logprobs is None
            else self.scores[index].of_chat(sample.logprobs),
            finish_reason=cast(FinishReason, answered.finish_reason(sample.finish_reason)),
            token_ids=list(sample.token_ids) if self.body.return_token_ids else None,
        )


@final
class _Chunks:
    """The events of a streamed chat: chunks.

    Args:
      prompt: returns the prompt's tokens, once a piece has come; None where they are not known.
      num_prompt_tokens: returns the number of them at the end, where they are not known.
    """

    def __init__(
        self,
        answer: _Chat,
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
        self._num_tokens = 0
        self._event = ChoiceEvent(self._chunk())

    def begin(self) -> bytes:
        """Return nothing: a choice's first event comes with its first piece."""
        return b""

    def of(self, group: Group) -> bytes:
        """Return the chunks of pieces."""
        told = self._lengths.of((piece.sample_index, piece) for _, piece in group)
        return comments(told) + b"".join(self._of(piece) for _, piece in group)

    def end(self) -> bytes:
        """Return the chunk of the usage, if it was asked for."""
        if not self._with_usage:
            return b""
        num_prompt = len(self._prompt()) if self._prompt else self._num_prompt_tokens()
        return event_of(self._chunk(usage=Usage.of(num_prompt, self._num_tokens)))

    def _of(self, piece: Piece) -> bytes:
        self._num_tokens += len(piece.token_ids)
        index, is_first = piece.sample_index, piece.sample_index not in self._begun
        is_call = False
        is_plain = not (self._answer.tools.is_given or self._with_ids or piece.logprobs)
        if is_plain and (piece.text or not piece.finish_reason):
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
        """Return what a piece adds, a choice for each chunk; none if all of it is held back."""
        answer, reason = self._answer, piece.finish_reason
        index, logprobs = piece.sample_index, piece.logprobs
        answered, has_tools = answer.answered[index], answer.tools.is_given
        found = deltas(answered.push(piece.text, is_last=reason is not None))
        if not found and (reason or logprobs or self._with_ids or not has_tools):
            found = [Delta(content=None if reason or has_tools else "")]
        ended = cast(FinishReason, reason and answered.finish_reason(reason))
        scored = answer.scores[index].of_chat(logprobs) if logprobs else None
        token_ids = list(piece.token_ids) if self._with_ids else None
        last = len(found) - 1
        return [
            ChunkChoice(
                index=index,
                delta=delta,
                logprobs=None if i else scored,
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


def _bare(index: int, delta: str, finish_reason: str | None = None) -> str:
    reason = "null" if finish_reason is None else compact(finish_reason)
    return f'{{"index":{index},"delta":{{{delta}}},"logprobs":null,"finish_reason":{reason}}}'


def _role(index: int, *, is_call: bool) -> str:
    """Return the choice before a sample's first one; it has no content where a call begins it."""
    return _bare(index, '"role":"assistant"' if is_call else '"role":"assistant","content":""')
