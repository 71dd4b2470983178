"""`/v1/responses`."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast, final

from fastapi import APIRouter
from fastapi.sse import format_sse_event
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.request import Completion, TokenLogprob
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.runtime import Service
from jaxserve.server import scores
from jaxserve.server.errors import invalid
from jaxserve.server.events import EventStream, Replies, json_response
from jaxserve.server.exchange import Exchange, Group, Job, unless_gone
from jaxserve.server.guard import note, notes_here
from jaxserve.server.lengths import LengthComments
from jaxserve.server.params import of_format
from jaxserve.server.relay import Relay
from jaxserve.server.routes.common import ANSWERING, Here, documented, need_tokenizer, new_id, now_s
from jaxserve.server.schema.base import Reply, ScoredChoice
from jaxserve.server.schema.responses import (
    Incomplete,
    InputMessage,
    OutputMessage,
    OutputText,
    ResponseEvent,
    ResponseReply,
    ResponseRequest,
    ResponseUsage,
)
from jaxserve.server.turn import TurnExchange

router = APIRouter()


@router.post(
    "/v1/responses",
    response_model=ResponseReply,
    responses=documented(*ANSWERING, stream=True),
    tags=["answers"],
)
async def respond(body: ResponseRequest, http: Request, backend: Here) -> Response:
    """Answer a chat, in the form of OpenAI's newer API."""
    backend.check_model(body.model)
    note(notes_here(), user=body.user, safety_identifier=body.safety_identifier)
    tokenizer = need_tokenizer(backend.ready_service())
    answer = _Answer(body, _params(body), backend.options.model_name, tokenizer)
    if answer.conversation_id is not None:
        turn = TurnExchange(backend, answer.conversation_id, answer.messages, answer.params)
        if not body.stream:
            return json_response(answer.reply(await unless_gone(http, turn.completion())))
        relay = Relay(turn.pieces())
        await unless_gone(http, relay.until_begun())
        replies = answer.events(relay.groups(), lambda: turn.num_prompt_tokens)
        return _stream(replies, relay.close)
    exchange = Exchange(backend)
    await unless_gone(http, exchange.start(answer.jobs))
    if not body.stream:
        return json_response(answer.reply((await unless_gone(http, exchange.completions()))[0]))
    await unless_gone(http, exchange.until_begun())
    num_prompt = len(exchange.jobs[0].prompt)
    return _stream(answer.events(exchange.pieces(), lambda: num_prompt), exchange.close)


def _params(body: ResponseRequest) -> SamplingParams:
    wants_scores = bool(body.include)
    if body.top_logprobs is not None and not wants_scores:
        raise invalid("top_logprobs needs include=['message.output_text.logprobs']", "top_logprobs")
    return SamplingParams(
        max_tokens=body.max_output_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        logprobs=(body.top_logprobs or 0) if wants_scores else None,
        **of_format(None if body.text is None else body.text.format),
    )


def _stream(replies: Replies, close: Callable[[], None]) -> EventStream:
    def to_event(reply: Reply) -> bytes:
        event = cast(ResponseEvent, reply)
        return format_sse_event(event=event.type, data_str=event.model_dump_json())

    return EventStream(replies, close, to_event, last=b"", error_event="error")


def _text(message: InputMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text for part in message.content)


@final
@dataclass
class _Answer:
    """The answer to one request."""

    body: ResponseRequest
    params: SamplingParams
    model: str
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        self.id, self.item_id = new_id("resp"), new_id("msg")
        self.created_at = now_s()
        given = self.body.conversation
        self.conversation_id = given if given is None or isinstance(given, str) else given.id
        self._numbers = itertools.count()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates read them."""
        body = self.body
        start = [{"role": "system", "content": body.instructions}] if body.instructions else []
        if isinstance(body.input, str):
            return [*start, {"role": "user", "content": body.input}]
        others = [
            {"role": "system" if one.role == "developer" else one.role, "content": _text(one)}
            for one in body.input
        ]
        return [*start, *others]

    def jobs(self, _: Service) -> list[Job]:
        """Return the one prompt."""
        return [Job(self.tokenizer.apply_chat_template(self.messages), self.params)]

    def reply(self, completion: Completion) -> ResponseReply:
        """Return the whole answer."""
        reply = self._ended(
            completion.text,
            self._scored(completion.logprobs),
            completion.finish_reason,
            len(completion.prompt_token_ids),
            len(completion.token_ids),
        )
        return reply.model_copy(update={"predicted_tokens": completion.predicted_tokens})

    async def events(
        self, groups: AsyncGenerator[Group], num_prompt_tokens: Callable[[], int]
    ) -> Replies:
        """Yield the events of a streamed answer."""
        empty = OutputText(text="")
        at: Any = {"output_index": 0, "content_index": 0, "item_id": self.item_id}
        text, found, reason, num_tokens = "", [], None, 0
        lengths = LengthComments(self.params.max_tokens)
        async with aclosing(groups):
            for kind in ("response.created", "response.in_progress"):
                yield self._event(kind, response=self._reply("in_progress"))
            item = self._message("in_progress", [])
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._event("response.content_part.added", part=empty, **at)
            async for group in groups:
                if not group:
                    yield "waiting"
                for comment in lengths.of((0, piece) for _, piece in group):
                    yield comment
                for _, piece in group:
                    scored = self._scored(piece.logprobs)
                    text, reason = text + piece.text, piece.finish_reason or reason
                    found += scored
                    num_tokens += len(piece.token_ids)
                    if piece.text or scored:
                        yield self._event(
                            "response.output_text.delta", delta=piece.text, logprobs=scored, **at
                        )
        reply = self._ended(text, found, reason, num_prompt_tokens(), num_tokens)
        part = reply.output[0].content[0]
        yield self._event("response.output_text.done", text=text, logprobs=found, **at)
        yield self._event("response.content_part.done", part=part, **at)
        yield self._event("response.output_item.done", output_index=0, item=reply.output[0])
        yield self._event(f"response.{reply.status}", response=reply)

    def _format(self) -> dict[str, Any]:
        text = self.body.text
        if text is None or text.format is None:
            return {"type": "text"}
        return text.format.model_dump(by_alias=True, exclude_none=True)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        return ResponseEvent(type=kind, sequence_number=next(self._numbers), **fields)

    def _scored(self, found: Sequence[TokenLogprob] | None) -> list[ScoredChoice]:
        return scores.of_chat(found, self.tokenizer).content if found else []

    def _message(self, status: Any, content: list[OutputText]) -> OutputMessage:
        return OutputMessage(id=self.item_id, status=status, content=content)

    def _ended(
        self,
        text: str,
        found: list[ScoredChoice],
        finish_reason: str | None,
        num_prompt: int,
        num_output: int,
    ) -> ResponseReply:
        status = "incomplete" if finish_reason == "length" else "completed"
        message = self._message(status, [OutputText(text=text, logprobs=found)])
        usage = ResponseUsage(
            input_tokens=num_prompt,
            output_tokens=num_output,
            total_tokens=num_prompt + num_output,
        )
        return self._reply(status, [message], usage)

    def _reply(
        self,
        status: Any,
        output: list[OutputMessage] | None = None,
        usage: ResponseUsage | None = None,
    ) -> ResponseReply:
        return ResponseReply(
            id=self.id,
            created_at=self.created_at,
            status=status,
            incomplete_details=Incomplete() if status == "incomplete" else None,
            instructions=self.body.instructions,
            max_output_tokens=self.body.max_output_tokens,
            model=self.model,
            output=output or [],
            temperature=self.params.temperature,
            text={"format": self._format()},
            top_p=self.params.top_p,
            usage=usage,
            user=self.body.user,
            metadata=self.body.metadata or {},
            conversation=None if self.conversation_id is None else {"id": self.conversation_id},
        )
