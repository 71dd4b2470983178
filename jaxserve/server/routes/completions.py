"""`/v1/completions`."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast, final

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
from jaxserve.server.events import EventStream, Replies, json_response
from jaxserve.server.exchange import Exchange, Job
from jaxserve.server.guard import note, notes_here
from jaxserve.server.lengths import LengthComments
from jaxserve.server.routes.common import (
    ANSWERING,
    Here,
    InClass,
    documented,
    need_tokenizer,
    new_id,
    now_s,
)
from jaxserve.server.schema.base import FinishReason, Usage
from jaxserve.server.schema.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    CompletionRequest,
)

router = APIRouter()


@router.post(
    "/v1/completions",
    response_model=CompletionReply,
    responses=documented(*ANSWERING, stream=True),
    tags=["answers"],
)
async def complete(body: CompletionRequest, http: Request, backend: Here, own: InClass) -> Response:
    """Continue one or several prompts."""
    adapter = backend.adapter_of(body.model)
    note(notes_here(), user=body.user)
    tokenizer = need_tokenizer(backend.ready_service())
    reply_id = new_id("cmpl")
    exchange = Exchange(backend, reply_id)
    params = own.apply(replace(params_of.of_completion(body), adapter=adapter))
    model = adapter or backend.options.model_name
    answer = _Answer(reply_id, body, params, exchange, model, tokenizer)
    if body.stream:
        await unless_gone(http.receive, exchange.begin(answer.jobs))
        return EventStream(answer.chunks(), exchange.close)
    return json_response(
        answer.reply(await unless_gone(http.receive, exchange.answer(answer.jobs)))
    )


@final
@dataclass
class _Answer:
    """The completions of one request."""

    id: str
    body: CompletionRequest
    params: SamplingParams
    exchange: Exchange
    model: str
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        self.created = now_s()
        # Characters of each choice so far.
        self.num_shown: dict[int, int] = {}

    def jobs(self, _: Service) -> list[Job]:
        """Return the prompts."""
        given: Any = self.body.prompt
        if isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        prompts = [self.tokenizer.encode(one) if isinstance(one, str) else one for one in given]
        return [Job(prompt, self.params, self.body.priority or 0) for prompt in prompts]

    def reply(self, completions: list[Completion]) -> CompletionReply:
        """Return the whole answer."""
        choices = [
            self._choice(p * self.params.n + i, completion, sample)
            for p, completion in enumerate(completions)
            for i, sample in enumerate(completion.samples)
        ]
        num_prompt = sum(len(completion.prompt_token_ids) for completion in completions)
        num_output = sum(len(s.token_ids) for c in completions for s in c.samples)
        return self._reply(choices, Usage.of(num_prompt, num_output))

    def _choice(self, index: int, completion: Completion, sample: Sample) -> CompletionChoice:
        prompt = completion.prompt_token_ids
        shown = self._prompt_text(prompt)
        with_ids = bool(self.body.return_token_ids)
        return CompletionChoice(
            index=index,
            text=shown + sample.text,
            logprobs=self._logprobs(completion, sample, len(shown)),
            finish_reason=cast(FinishReason, sample.finish_reason),
            token_ids=list(sample.token_ids) if with_ids else None,
            prompt_token_ids=list(prompt) if with_ids else None,
            prompt_logprobs=scores.of_prompt(completion.prompt_logprobs, self.tokenizer)
            if self.body.prompt_logprobs is not None and completion.prompt_logprobs is not None
            else None,
            predicted_tokens=completion.predicted_tokens,
        )

    def _prompt_text(self, prompt: tuple[int, ...] | list[int]) -> str:
        return self.tokenizer.decode(prompt) if self.body.echo else ""

    def _logprobs(
        self, completion: Completion, sample: Sample, offset: int
    ) -> CompletionLogprobs | None:
        if sample.logprobs is None:
            return None
        token_ids, found = list(sample.token_ids), list(sample.logprobs)
        if self.body.echo:
            token_ids = [*completion.prompt_token_ids, *token_ids]
            found = [*(completion.prompt_logprobs or ()), *found]
            offset = 0
        return scores.of_completion(
            found, token_ids, self.tokenizer, with_top=bool(self.body.logprobs), offset=offset
        )

    async def chunks(self) -> Replies:
        """Yield the events of a streamed answer."""
        options, n = self.body.stream_options, self.params.n
        num_tokens, lengths = 0, LengthComments(self.params.max_tokens)
        async with aclosing(self.exchange.pieces()) as groups:
            if self.body.echo:
                for p, job in enumerate(self.exchange.jobs):
                    for index in range(p * n, (p + 1) * n):
                        text = self._prompt_text(job.prompt)
                        self.num_shown[index] = len(text)
                        choice = CompletionChoice(index=index, text=text, finish_reason=None)
                        yield self._reply([choice])
            async for group in groups:
                if not group:
                    yield "waiting"
                indexed = [(p * n + piece.sample_index, piece) for p, piece in group]
                for comment in lengths.of(indexed):
                    yield comment
                for index, piece in indexed:
                    num_tokens += len(piece.token_ids)
                    yield self._reply([self._added(index, piece)])
        if options is not None and options.include_usage:
            num_prompt = sum(len(job.prompt) for job in self.exchange.jobs)
            yield self._reply([], Usage.of(num_prompt, num_tokens))

    def _added(self, index: int, piece: Piece) -> CompletionChoice:
        offset = self.num_shown.get(index, 0)
        self.num_shown[index] = offset + len(piece.text)
        return CompletionChoice(
            index=index,
            text=piece.text,
            logprobs=scores.of_completion(
                piece.logprobs,
                piece.token_ids,
                self.tokenizer,
                with_top=bool(self.body.logprobs),
                offset=offset,
            )
            if piece.logprobs
            else None,
            finish_reason=cast(FinishReason, piece.finish_reason),
            token_ids=list(piece.token_ids) if self.body.return_token_ids else None,
        )

    def _reply(
        self, choices: list[CompletionChoice], usage: Usage | None = None
    ) -> CompletionReply:
        return CompletionReply(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )
