"""`/tokenize`, `/detokenize`, and `/inference/v1/generate`: tokens in and out."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, cast, final

from anyio import to_thread
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.request import Completion, TokenLogprob
from jaxserve.core.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxserve.engine.answers import Piece
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
from jaxserve.server.params import check_no_prompt_logprobs, sampling_params
from jaxserve.server.routes.common import (
    ANSWERING,
    READING,
    Here,
    InClass,
    check_num_samples,
    documented,
    is_short,
    need_tokenizer,
    new_id,
)
from jaxserve.server.schema import (
    MAX_INT32,
    NONE_IF_EMPTY,
    Choosing,
    Items,
    Message,
    Reply,
    Strict,
    TokenId,
    Tool,
    Usage,
    as_template_message,
    optional,
    predicted,
)
from jaxserve.server.scores import finite, text_of
from jaxserve.server.tools import Tools

router = APIRouter()


# Maximum number of tokens whose texts `/tokenize` returns; each one is decoded by itself.
_MAX_TOKEN_STRS = 1 << 17


class TokenizeRequest(Strict):
    """Text, or a chat for the model's template: exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Items[Message], Field(min_length=1)] | None = None
    tools: Annotated[Items[Tool], Field(max_length=128), NONE_IF_EMPTY] | None = Field(
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


@router.post(
    "/tokenize", response_model=TokenizeReply, responses=documented(*READING), tags=["tokens"]
)
async def tokenize(body: TokenizeRequest, backend: Here) -> Response:
    """Return the token ids of a text or a chat."""
    backend.adapter_of(body.model)
    service = backend.ready_service()
    tokenizer = need_tokenizer(service)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("pass exactly one of prompt and messages", "prompt")
    of_chats = ("add_generation_prompt", "tools")
    for name in ("add_special_tokens",) if body.messages else of_chats:
        if getattr(body, name) is not None:
            raise invalid(f"{name} has no effect on this kind of prompt; leave it out", name)

    def encode() -> list[int]:
        if body.messages is None:
            return tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)
        messages = [as_template_message(message) for message in body.messages]
        add = body.add_generation_prompt is not False
        return Tools(body.tools, None, None, tokenizer).prompt(messages, add_generation_prompt=add)

    def answer() -> Response:
        found, texts = encode(), None
        if body.return_token_strs:
            if len(found) > _MAX_TOKEN_STRS:
                raise invalid(
                    f"return_token_strs allows {_MAX_TOKEN_STRS} tokens, and there are "
                    f"{len(found)}; shorten the prompt, or leave return_token_strs out",
                    "return_token_strs",
                )
            texts = [text_of(token, tokenizer) for token in found]
        reply = TokenizeReply(
            tokens=found, count=len(found), max_model_len=backend.max_model_len, token_strs=texts
        )
        return json_response(reply)

    return await to_thread.run_sync(answer)


@router.post(
    "/detokenize", response_model=DetokenizeReply, responses=documented(*READING), tags=["tokens"]
)
async def detokenize(body: DetokenizeRequest, backend: Here) -> Response:
    """Return the text of token ids."""
    backend.adapter_of(body.model)
    service = backend.ready_service()
    tokenizer = need_tokenizer(service)
    bad = [token for token in body.tokens if token >= service.vocab_size]
    if bad:
        raise invalid(
            f"token id {bad[0]} is outside the vocabulary of {service.vocab_size}", "tokens"
        )
    text = await to_thread.run_sync(lambda: tokenizer.decode(body.tokens, False))
    return json_response(DetokenizeReply(prompt=text))


@router.post(
    "/inference/v1/generate",
    response_model=GenerateReply,
    responses=documented(*ANSWERING, stream=True),
    tags=["answers"],
)
async def generate(body: GenerateRequest, http: Request, backend: Here, own: InClass) -> Response:
    """Continue token ids with token ids, for instance for the rollouts of a trainer."""
    adapter = backend.adapter_of(body.model)
    reply_id, model = new_id("gen"), adapter or backend.options.model_name
    params = own.apply(replace(_params(body), adapter=adapter))
    check_num_samples(params.n, backend)
    exchange = Exchange(backend, reply_id, at_once=is_short(http, backend, params))
    job = Job(body.token_ids, params, body.priority or 0)
    if body.stream:
        events = _TokenChunks(
            exchange, reply_id, model, LengthComments(params.max_tokens, backend.metrics.pace_s)
        )
        return EventStream(exchange.stream(lambda _: [job]), events, exchange.close)
    (completion,) = await unless_gone(http.receive, exchange.answer(lambda _: [job]))
    return json_response(_reply(completion, reply_id, model))


def _params(body: GenerateRequest) -> SamplingParams:
    given = body.sampling_params
    if body.stream:
        check_no_prompt_logprobs(given)
    return sampling_params(
        given, max_tokens=given.max_tokens, n=given.n or 1, logprobs=given.logprobs
    )


def _reply(completion: Completion, reply_id: str, model: str) -> GenerateReply:
    choices = [
        _choice(i, sample.token_ids, sample.logprobs, sample.finish_reason)
        for i, sample in enumerate(completion.samples)
    ]
    found = completion.prompt_logprobs
    num_output = sum(len(sample.token_ids) for sample in completion.samples)
    return GenerateReply(
        request_id=reply_id,
        model=model,
        choices=choices,
        prompt_logprobs=None
        if found is None
        else [None if score is None else finite(score.logprob) for score in found],
        predicted_tokens=completion.predicted_tokens,
        usage=Usage.of(len(completion.prompt_token_ids), num_output, completion.num_cached_tokens),
    )


@final
class _TokenChunks:
    def __init__(self, exchange: Exchange, reply_id: str, model: str, lengths: LengthComments):
        self._exchange = exchange
        self._reply = GenerateReply(request_id=reply_id, model=model, choices=[])
        self._event = ChoiceEvent(self._reply)
        self._lengths = lengths
        self._num_tokens = self._num_cached = 0

    def begin(self) -> bytes:
        return b""

    def of(self, group: Group) -> bytes:
        told = self._lengths.of((piece.sample_index, piece) for _, piece in group)
        return told + b"".join(self._of(piece) for _, piece in group)

    def end(self) -> bytes:
        num_prompt = len(self._exchange.jobs[0].prompt)
        usage = Usage.of(num_prompt, self._num_tokens, self._num_cached)
        return event_of(self._reply.model_copy(update={"usage": usage}))

    def _of(self, piece: Piece) -> bytes:
        self._num_tokens += len(piece.token_ids)
        if not piece.sample_index:
            self._num_cached = piece.num_cached_tokens
        logprobs = piece.logprobs
        if logprobs and any(score.top for score in logprobs):
            choice = _choice(piece.sample_index, piece.token_ids, logprobs, piece.finish_reason)
            return self._event.of(choice.model_dump_json())
        scored = ""
        if logprobs is not None:
            scored = f'"logprobs":{compact([finite(score.logprob) for score in logprobs])},'
        reason = "null" if piece.finish_reason is None else compact(piece.finish_reason)
        return self._event.of(
            f'{{"index":{piece.sample_index},"token_ids":[{",".join(map(str, piece.token_ids))}],'
            f'{scored}"finish_reason":{reason}}}'
        )


def _choice(
    index: int,
    token_ids: tuple[int, ...],
    scores: tuple[TokenLogprob, ...] | None,
    finish_reason: Any,
) -> GenerateChoice:
    tops = None
    if scores is not None and any(score.top for score in scores):
        tops = [
            [TopToken(token_id=token, logprob=finite(logprob)) for token, logprob in score.top]
            for score in scores
        ]
    return GenerateChoice(
        index=index,
        token_ids=list(token_ids),
        logprobs=None if scores is None else [finite(score.logprob) for score in scores],
        top_logprobs=tops,
        finish_reason=cast(Any, finish_reason),
    )
