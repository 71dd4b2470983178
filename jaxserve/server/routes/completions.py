"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, cast, final

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.request import Completion, Sample
from jaxserve.core.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxserve.engine.answers import Piece
from jaxserve.models.tokenizer import Tokenizer
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
from jaxserve.server.params import check_streaming, sampling_params
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
)
from jaxserve.server.schema import (
    MAX_INT32,
    Asking,
    CompletionLogprobs,
    FinishReason,
    Items,
    PromptLogprobs,
    Reply,
    TokenId,
    Usage,
    optional,
    predicted,
    unused,
)
from jaxserve.server.scores import LogprobFormatter

Tokens = Annotated[Items[TokenId], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]

router = APIRouter()

# The default of OpenAI's completions.
_COMPLETION_TOKENS = 16


class CompletionRequest(Asking):
    """One or several prompts, and how they are continued."""

    prompt: (
        Text
        | Annotated[Items[Text], Field(min_length=1)]
        | Tokens
        | Annotated[Items[Tokens], Field(min_length=1)]
    )
    max_tokens: int | None = Field(
        None, ge=0, le=MAX_INT32, description="16 by default; 0 with echo, for the prompt alone."
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = Field(None, description="Put the prompt before each completion.")
    best_of: int | None = Field(None, description="The same as `n`: no sample is left out.")
    suffix: None = unused()


class CompletionChoice(Reply):
    """One sample of one prompt; with n samples, sample i of prompt p has the index p * n + i."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = optional()
    prompt_token_ids: list[int] | None = optional()
    prompt_logprobs: PromptLogprobs | None = optional()
    predicted_tokens: int | None = predicted()


class CompletionReply(Reply):
    """The completions; also one event of a streamed answer, with what it adds."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = optional()


class CountedCompletionChunk(CompletionReply):
    """One event of an answer with usage, which is null except in the last event."""

    usage: Usage | None = None


@router.post(
    "/v1/completions",
    response_model=CompletionReply,
    responses=documented(*ANSWERING, stream=True),
    tags=["answers"],
)
async def complete(body: CompletionRequest, http: Request, backend: Here, own: InClass) -> Response:
    """Continue one or several prompts."""
    adapter = backend.adapter_of(body.model)
    check_fields(body, backend)
    tokenizer = need_tokenizer(backend.ready_service())
    reply_id = new_id("cmpl")
    params = own.apply(replace(_params(body), adapter=adapter, tenant=body.user or None))
    prompts = _prompts(body)
    check_num_samples(len(prompts) * params.n, backend)
    exchange = Exchange(backend, reply_id, at_once=is_short(http, backend, params))
    model = adapter or backend.options.model_name
    answer = _CompletionAnswer(reply_id, body, prompts, params, exchange, model, tokenizer)
    if body.stream:
        events = _CompletionChunks(
            answer, LengthComments(params.max_tokens, backend.metrics.pace_s)
        )
        return EventStream(exchange.stream(answer.jobs), events, exchange.close)
    return json_response(
        answer.reply(await unless_gone(http.receive, exchange.answer(answer.jobs)))
    )


def _params(body: CompletionRequest) -> SamplingParams:
    check_streaming(body)
    most = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if most == 0 and (body.stream or not body.echo):
        raise invalid(
            "max_tokens=0 needs echo=true and stream=false; pass at least 1", "max_tokens"
        )
    if body.best_of not in (None, body.n or 1):
        raise invalid(
            f"best_of={body.best_of} is not supported by this server, which returns all samples; "
            "leave it out",
            "best_of",
        )
    others: dict[str, Any] = {}
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise invalid("echo with logprobs cannot be streamed; pass stream=false", "echo")
        others["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    # Log-probabilities of the prompt come with a token, which the answer then leaves out.
    most = max(most, 1)
    return sampling_params(body, max_tokens=most, n=body.n or 1, logprobs=body.logprobs, **others)


def _emptied(completion: Completion) -> tuple[Sample, ...]:
    """Return the samples of a completion without their tokens."""
    return tuple(
        Sample(
            text="",
            token_ids=(),
            finish_reason="length",
            logprobs=None if sample.logprobs is None else (),
        )
        for sample in completion.samples
    )


def _prompts(body: CompletionRequest) -> Any:
    given: Any = body.prompt
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


@final
@dataclass
class _CompletionAnswer:
    id: str
    body: CompletionRequest
    prompts: list[str] | list[list[int]]
    params: SamplingParams
    exchange: Exchange
    model: str
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        self.created = now_s()

    def jobs(self, _: Service) -> list[Job]:
        prompts = [
            self.tokenizer.encode(one) if isinstance(one, str) else one for one in self.prompts
        ]
        return [Job(prompt, self.params, self.body.priority or 0) for prompt in prompts]

    def reply(self, completions: list[Completion]) -> CompletionReply:
        if self.body.max_tokens == 0:
            completions = [replace(each, samples=_emptied(each)) for each in completions]
        choices = [
            self._choice(p * self.params.n + i, completion, sample)
            for p, completion in enumerate(completions)
            for i, sample in enumerate(completion.samples)
        ]
        num_prompt = sum(len(completion.prompt_token_ids) for completion in completions)
        num_output = sum(len(s.token_ids) for c in completions for s in c.samples)
        num_cached = sum(completion.num_cached_tokens for completion in completions)
        return CompletionReply(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=Usage.of(num_prompt, num_output, num_cached),
        )

    def _choice(self, index: int, completion: Completion, sample: Sample) -> CompletionChoice:
        prompt = completion.prompt_token_ids
        shown = self.echoed(index)
        with_ids = bool(self.body.return_token_ids)
        return CompletionChoice(
            index=index,
            text=shown + sample.text,
            logprobs=self._logprobs(index, completion, sample, len(shown)),
            finish_reason=cast(FinishReason, sample.finish_reason),
            token_ids=list(sample.token_ids) if with_ids else None,
            prompt_token_ids=list(prompt) if with_ids else None,
            prompt_logprobs=LogprobFormatter(self.tokenizer, after=()).of_prompt(
                completion.prompt_logprobs, prompt
            )
            if self.body.prompt_logprobs is not None and completion.prompt_logprobs is not None
            else None,
            predicted_tokens=completion.predicted_tokens,
        )

    def echoed(self, index: int) -> str:
        """Return what precedes the text of a choice: the prompt as it was given, or nothing."""
        if not self.body.echo:
            return ""
        given = self._given(index)
        return given if isinstance(given, str) else self.tokenizer.decode(given, False)

    def _given(self, index: int) -> str | list[int]:
        return self.prompts[index // self.params.n]

    def _logprobs(
        self, index: int, completion: Completion, sample: Sample, offset: int
    ) -> CompletionLogprobs | None:
        if sample.logprobs is None:
            return None
        prompt, num_top = completion.prompt_token_ids, self.body.logprobs or 0
        found = self.scores(prompt, offset).of_completion(
            sample.logprobs, sample.token_ids, num_top
        )
        if not self.body.echo or completion.prompt_logprobs is None:
            return found
        return LogprobFormatter.of_echo(
            self.tokenizer, self._given(index), prompt, completion.prompt_logprobs, num_top
        ).followed_by(found)

    def scores(self, prompt: Sequence[int], offset: int = 0) -> LogprobFormatter:
        """Return the formatter of a sample's scores, before its first token."""
        skip = self.params.skip_special_tokens
        return LogprobFormatter(
            self.tokenizer, after=prompt, skip_special_tokens=skip, offset=offset
        )


@final
class _CompletionChunks:
    """The events of streamed completions: chunks."""

    def __init__(self, answer: _CompletionAnswer, lengths: LengthComments):
        self._answer = answer
        options = answer.body.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._with_ids = bool(answer.body.return_token_ids)
        self._lengths = lengths
        self._num_tokens = 0
        self._num_cached: dict[int, int] = {}  # of each prompt
        self._scores: dict[int, LogprobFormatter] = {}
        self._has_echoed = False
        self._begun: set[int] = set()
        self._event = ChoiceEvent(self._chunk())

    def begin(self) -> bytes:
        """Return nothing: prompts may not be known yet."""
        return b""

    def _echo(self) -> bytes:
        """Return the texts of the prompts, with which the choices begin."""
        answer = self._answer
        texts = [answer.echoed(i) for i in range(len(answer.prompts) * answer.params.n)]
        self._has_echoed = True
        return b"".join(self._event.of(_plain(i, text, None)) for i, text in enumerate(texts))

    def of(self, group: Group) -> bytes:
        n = self._answer.params.n
        indexed = [(p * n + piece.sample_index, piece) for p, piece in group]
        self._num_cached |= {p: x.num_cached_tokens for p, x in group if not x.sample_index}
        told = self._lengths.of(indexed)
        if self._answer.body.echo and not self._has_echoed:
            told += self._echo()
        return told + b"".join(self._of(index, piece) for index, piece in indexed)

    def end(self) -> bytes:
        """Return the chunk of the usage, if it was asked for."""
        if not self._with_usage:
            return b""
        num_prompt = sum(len(job.prompt) for job in self._answer.exchange.jobs)
        num_cached = sum(self._num_cached.values())
        return event_of(self._chunk(Usage.of(num_prompt, self._num_tokens, num_cached)))

    def _of(self, index: int, piece: Piece) -> bytes:
        self._num_tokens += len(piece.token_ids)
        if not (piece.logprobs or self._with_ids):
            return self._event.of(_plain(index, piece.text, piece.finish_reason))
        choice = CompletionChoice(
            index=index,
            text=piece.text,
            logprobs=self._logprobs(index, piece),
            finish_reason=cast(FinishReason, piece.finish_reason),
            token_ids=list(piece.token_ids) if self._with_ids else None,
            prompt_token_ids=self._new_prompt(index) if self._with_ids else None,
        )
        self._begun.add(index)
        return self._event.of(choice.model_dump_json())

    def _logprobs(self, index: int, piece: Piece) -> CompletionLogprobs | None:
        if not piece.logprobs:
            return None
        if index not in self._scores:
            self._scores[index] = self._answer.scores(self._prompt(index))
        num_top = self._answer.body.logprobs or 0
        return self._scores[index].of_completion(piece.logprobs, piece.token_ids, num_top)

    def _new_prompt(self, index: int) -> list[int] | None:
        """Return the prompt of a choice for its first chunk with tokens; None for later ones."""
        return None if index in self._begun else self._prompt(index)

    def _prompt(self, index: int) -> list[int]:
        return self._answer.exchange.jobs[index // self._answer.params.n].prompt

    def _chunk(self, usage: Usage | None = None) -> CompletionReply:
        answer = self._answer
        return (CountedCompletionChunk if self._with_usage else CompletionReply)(
            id=answer.id, created=answer.created, model=answer.model, choices=[], usage=usage
        )


def _plain(index: int, text: str, finish_reason: str | None) -> str:
    """Return the JSON of a `CompletionChoice` that has text only."""
    reason = "null" if finish_reason is None else compact(finish_reason)
    return f'{{"index":{index},"text":{compact(text)},"logprobs":null,"finish_reason":{reason}}}'
