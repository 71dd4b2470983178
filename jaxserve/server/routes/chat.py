"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import cast, final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.request import Completion, Sample
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.runtime import Service
from jaxserve.server import params as params_of
from jaxserve.server import scores
from jaxserve.server.disconnects import unless_gone
from jaxserve.server.errors import invalid
from jaxserve.server.events import EventStream, Replies, json_response
from jaxserve.server.exchange import Exchange, Group, Job
from jaxserve.server.guard import note, notes_here
from jaxserve.server.lengths import LengthComments
from jaxserve.server.relay import Relay
from jaxserve.server.routes.common import ANSWERING, Here, documented, need_tokenizer, new_id, now_s
from jaxserve.server.schema.base import FinishReason, Usage
from jaxserve.server.schema.chat import (
    ChatChoice,
    ChatChunk,
    ChatReply,
    ChatRequest,
    ChunkChoice,
    Delta,
    as_template_message,
)
from jaxserve.server.tools import Tools, deltas, whole
from jaxserve.server.turn import TurnExchange

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    response_model=ChatReply,
    responses=documented(*ANSWERING, stream=True),
    tags=["answers"],
)
async def chat(body: ChatRequest, http: Request, backend: Here) -> Response:
    """Answer a chat."""
    adapter = backend.adapter_of(body.model)
    note(notes_here(), user=body.user, safety_identifier=body.safety_identifier)
    tokenizer = need_tokenizer(backend.ready_service())
    tools = Tools(body.tools, body.tool_choice, body.parallel_tool_calls, tokenizer)
    params = replace(params_of.of_chat(body, tools), adapter=adapter)
    answer = _Chat(body, params, tools, adapter or backend.options.model_name, tokenizer)
    if body.conversation_id is not None:
        return await _turn(body, body.conversation_id, answer, http, backend)
    exchange = Exchange(backend, answer.id)
    if body.stream:
        await unless_gone(http.receive, exchange.begin(answer.jobs))
        prompt = exchange.jobs[0].prompt
        replies = answer.chunks(exchange.pieces(), lambda: len(prompt), prompt)
        return EventStream(replies, exchange.close)
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
    await unless_gone(http.receive, relay.until_begun())
    replies = answer.chunks(relay.groups(), lambda: exchange.num_prompt_tokens)
    return EventStream(replies, relay.close)


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
        self.answered = [
            self.tools.reader(is_streamed=bool(self.body.stream)) for _ in range(self.params.n)
        ]

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
            else scores.of_prompt(completion.prompt_logprobs, self.tokenizer),
            prompt_token_ids=list(prompt) if self.body.return_token_ids else None,
            conversation_id=self.body.conversation_id,
            predicted_tokens=completion.predicted_tokens,
        )

    def _whole(self, index: int, sample: Sample) -> ChatChoice:
        answered = self.answered[index]
        return ChatChoice(
            index=index,
            message=whole(answered.push(sample.text, is_last=True)),
            logprobs=None
            if sample.logprobs is None
            else scores.of_chat(sample.logprobs, self.tokenizer),
            finish_reason=cast(FinishReason, answered.finish_reason(sample.finish_reason)),
            token_ids=list(sample.token_ids) if self.body.return_token_ids else None,
        )

    async def chunks(
        self,
        groups: AsyncGenerator[Group],
        num_prompt_tokens: Callable[[], int],
        prompt: list[int] | None = None,
    ) -> Replies:
        """Yield the chunks of a streamed answer."""
        options = self.body.stream_options
        num_tokens, lengths = 0, LengthComments(self.params.max_tokens)
        begun: set[int] = set()
        async with aclosing(groups):
            async for group in groups:
                if not group:
                    yield "waiting"
                    continue
                for comment in lengths.of((piece.sample_index, piece) for _, piece in group):
                    yield comment
                for _, piece in group:
                    num_tokens += len(piece.token_ids)
                    choices = self._choices(piece)
                    if choices and piece.sample_index not in begun:
                        begun.add(piece.sample_index)
                        yield self._chunk(
                            [_first(choices[0])],
                            prompt_token_ids=prompt if self.body.return_token_ids else None,
                        )
                    for choice in choices:
                        yield self._chunk([choice])
        if options is not None and options.include_usage:
            yield self._chunk([], usage=Usage.of(num_prompt_tokens(), num_tokens))

    def _choices(self, piece: Piece) -> list[ChunkChoice]:
        """Return what a piece adds, a choice for each chunk; none if all of it is held back."""
        reason, answered = piece.finish_reason, self.answered[piece.sample_index]
        parts = answered.push(piece.text, is_last=reason is not None)
        added = [ChunkChoice(index=piece.sample_index, delta=delta) for delta in deltas(parts)]
        with_ids = bool(self.body.return_token_ids)
        if not added and (reason or piece.logprobs or with_ids or not self.tools.is_given):
            empty = Delta(content=None if reason or self.tools.is_given else "")
            added = [ChunkChoice(index=piece.sample_index, delta=empty)]
        if added:
            first, last = added[0], added[-1]
            first.logprobs = (
                scores.of_chat(piece.logprobs, self.tokenizer) if piece.logprobs else None
            )
            first.token_ids = list(piece.token_ids) if with_ids else None
            last.finish_reason = cast(FinishReason, reason and answered.finish_reason(reason))
        return added

    def _chunk(
        self,
        choices: list[ChunkChoice],
        usage: Usage | None = None,
        prompt_token_ids: list[int] | None = None,
    ) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )


def _first(choice: ChunkChoice) -> ChunkChoice:
    """Return the chunk before a sample's first one; content is null where a call begins it."""
    content = None if choice.delta.tool_calls else ""
    return ChunkChoice(index=choice.index, delta=Delta(role="assistant", content=content))
