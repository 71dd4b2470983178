"""`/v1/embeddings`, `/v1/rerank`, `/v1/score` and `/classify`: texts in, numbers out."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.models.pooling import Labels
from jaxserve.runtime import Service
from jaxserve.runtime.pooling import (
    check_dimensions,
    check_embeds,
    labels_of,
    pair_tokens,
    pooled_of,
    ranked,
    ranking_labels,
)
from jaxserve.server.backend import Backend
from jaxserve.server.errors import invalid
from jaxserve.server.events import json_response, unless_gone
from jaxserve.server.exchange import Exchange, Job
from jaxserve.server.guard import note, notes_here
from jaxserve.server.routes.common import (
    ANSWERING,
    Here,
    documented,
    is_short,
    need_tokenizer,
    new_id,
    now_s,
)
from jaxserve.server.schema import MAX_INT32, Items, Reply, Strict, TokenId, optional

# As OpenAI's API.
_MAX_TEXTS = 2048

Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[Items[TokenId], Field(min_length=1)]
Texts = Annotated[Items[Text], Field(min_length=1, max_length=_MAX_TEXTS)]

router = APIRouter()


class _Pooling(Strict):
    model: str | None = Field(None, description="The name in `/v1/models`; optional.")
    user: str | None = Field(None, description="Written to the access log.")
    priority: int | None = Field(
        None,
        ge=-MAX_INT32,
        le=MAX_INT32,
        description="Higher goes first; 0 unless the policy has a priority order.",
    )


class EmbeddingRequest(_Pooling):
    """One or several texts, or their tokens."""

    input: (
        Text | Texts | Tokens | Annotated[Items[Tokens], Field(min_length=1, max_length=_MAX_TEXTS)]
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description='"float" by default; "base64" has float32 numbers, little-endian.'
    )
    dimensions: int | None = Field(
        None, ge=1, le=MAX_INT32, description="Only for models whose config.json allows a cut."
    )


class ClassifyRequest(_Pooling):
    """One or several texts, or their tokens."""

    input: (
        Text | Texts | Tokens | Annotated[Items[Tokens], Field(min_length=1, max_length=_MAX_TEXTS)]
    )


class Document(Strict):
    """A document."""

    text: Text


Documents = Annotated[Items[Text | Document], Field(min_length=1, max_length=_MAX_TEXTS)]


class RerankRequest(_Pooling):
    """A query, and documents to order by their relevance."""

    query: Text
    documents: Documents
    top_n: int | None = Field(None, ge=0, description="Results to return; 0 and null return all.")
    return_documents: bool | None = Field(None, description="True by default.")
    instruction: str | None = Field(None, description="The task, for a model whose prompt has one.")


class ScoreRequest(_Pooling):
    """Pairs of texts: one with each of several, or as many of both."""

    text_1: Text | Texts
    text_2: Text | Texts


class PooledUsage(Reply):
    """Numbers of tokens of a request."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Reply):
    """The embedding of one text: numbers, or their bytes in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingReply(Reply):
    """The embeddings of the texts, in their order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: PooledUsage


class Classified(Reply):
    """The likeliest label of a text, and the probabilities of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyReply(Reply):
    """The labels of the texts, in their order, in vLLM's form."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classified]
    usage: PooledUsage


class DocumentReply(Reply):
    """A document."""

    text: str


class RankedDocument(Reply):
    """A document's place among those of the request, and its relevance."""

    index: int
    relevance_score: float
    document: DocumentReply | None = optional()


class RerankReply(Reply):
    """The documents, the most relevant first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PooledUsage


class Score(Reply):
    """The relevance of a pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreReply(Reply):
    """The relevances of the pairs, in their order, in vLLM's form."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage


@router.post(
    "/v1/embeddings",
    response_model=EmbeddingReply,
    responses=documented(*ANSWERING),
    tags=["pooling"],
)
async def embed(body: EmbeddingRequest, http: Request, backend: Here) -> Response:
    """Return the embeddings of one or several texts."""
    adapter = backend.adapter_of(body.model)
    config = backend.ready_service().model_config
    check_embeds(config)
    check_dimensions(body.dimensions, config)
    allowed = config.pooling.dimensions
    if body.dimensions not in (None, config.output_size) and allowed != "any":
        if body.dimensions not in (allowed or ()):
            shown = f"only to {allowed}" if allowed else "not"
            raise invalid(
                f"the embeddings of this model may {shown} be cut, by its config.json "
                "(matryoshka_dimensions, is_matryoshka); leave dimensions out",
                "dimensions",
            )
    texts = _texts(body.input)
    done = await _pooled(body, http, backend, lambda service: _tokens(texts, service))
    vectors = [
        config.pooling.embedding(pooled_of(each), dimensions=body.dimensions) for each in done
    ]
    data = [
        Embedding(index=i, embedding=_encoded(vector, body.encoding_format))
        for i, vector in enumerate(vectors)
    ]
    model = adapter or backend.options.model_name
    return json_response(EmbeddingReply(data=data, model=model, usage=_usage(done)))


@router.post(
    "/classify", response_model=ClassifyReply, responses=documented(*ANSWERING), tags=["pooling"]
)
async def classify(body: ClassifyRequest, http: Request, backend: Here) -> Response:
    """Return the labels of one or several texts; of a reward model, probs has the reward."""
    adapter = backend.adapter_of(body.model)
    labels = labels_of(backend.ready_service().model_config)
    texts = _texts(body.input)

    def tokens_of(service: Service) -> list[list[int]]:
        return [_counted(tokens, labels) for tokens in _tokens(texts, service)]

    done = await _pooled(body, http, backend, tokens_of)
    data = []
    for i, each in enumerate(done):
        logits = pooled_of(each)
        probabilities = logits if len(labels.names) == 1 else labels.probabilities(logits)
        data.append(
            Classified(
                index=i,
                label=labels.names[int(logits.argmax())],
                probs=probabilities.tolist(),
                num_classes=len(labels.names),
            )
        )
    return json_response(
        ClassifyReply(
            id=new_id("classify"),
            created=now_s(),
            model=adapter or backend.options.model_name,
            data=data,
            usage=_usage(done),
        )
    )


@router.post(
    "/v1/rerank", response_model=RerankReply, responses=documented(*ANSWERING), tags=["pooling"]
)
async def rerank(body: RerankRequest, http: Request, backend: Here) -> Response:
    """Order documents by their relevance to a query."""
    adapter = backend.adapter_of(body.model)
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    pairs = [(body.query, document) for document in documents]
    scores, done = await _scores(body, http, backend, pairs, body.instruction)
    shows = body.return_documents is not False
    results = [
        RankedDocument(
            index=each.index,
            relevance_score=each.relevance_score,
            document=DocumentReply(text=each.document) if shows else None,
        )
        for each in ranked(scores, documents, body.top_n or None)
    ]
    model = adapter or backend.options.model_name
    return json_response(
        RerankReply(id=new_id("rerank"), model=model, results=results, usage=_usage(done))
    )


@router.post(
    "/v1/score", response_model=ScoreReply, responses=documented(*ANSWERING), tags=["pooling"]
)
async def score(body: ScoreRequest, http: Request, backend: Here) -> Response:
    """Return the relevance of each text to another."""
    adapter = backend.adapter_of(body.model)
    first, second = (
        [given] if isinstance(given, str) else given for given in (body.text_1, body.text_2)
    )
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise invalid(
            f"text_1 has {len(first)} texts and text_2 {len(second)}; pass one text_1, or as many "
            "of both",
            "text_1",
        )
    pairs = list(zip(first, second, strict=True))
    scores, done = await _scores(body, http, backend, pairs, None)
    return json_response(
        ScoreReply(
            id=new_id("score"),
            created=now_s(),
            model=adapter or backend.options.model_name,
            data=[Score(index=i, score=each) for i, each in enumerate(scores)],
            usage=_usage(done),
        )
    )


async def _scores(
    body: _Pooling,
    http: Request,
    backend: Backend,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
) -> tuple[list[float], list[Completion]]:
    service = backend.ready_service()
    labels = ranking_labels(service.model_config)
    tokenizer = need_tokenizer(service)

    def tokens_of(_: Service) -> list[list[int]]:
        each = (pair_tokens(labels, tokenizer, *pair, instruction) for pair in pairs)
        return [_counted(tokens, labels) for tokens in each]

    done = await _pooled(body, http, backend, tokens_of)
    return [float(labels.relevance(pooled_of(each))) for each in done], done


async def _pooled(
    body: _Pooling, http: Request, backend: Backend, tokens_of: Callable[[Service], list[list[int]]]
) -> list[Completion]:
    note(notes_here(), user=body.user)
    params = SamplingParams(pools=True, adapter=backend.adapter_of(body.model))

    def jobs(service: Service) -> list[Job]:
        return [Job(tokens, params, body.priority or 0) for tokens in tokens_of(service)]

    exchange = Exchange(backend, new_id("pool"), at_once=is_short(http, backend, params))
    return await unless_gone(http.receive, exchange.answer(jobs))


def _texts(given: Any) -> Any:
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


def _tokens(texts: Sequence[str | list[int]], service: Service) -> list[list[int]]:
    return [
        need_tokenizer(service).encode(text) if isinstance(text, str) else text for text in texts
    ]


def _counted(tokens: Sequence[int], labels: Labels) -> list[int]:
    """Return the tokens that a classifier counts; too few are refused later."""
    return list(labels.without_padding(tuple(tokens)))


def _usage(done: Sequence[Completion]) -> PooledUsage:
    num_tokens = sum(len(completion.prompt_token_ids) for completion in done)
    return PooledUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)


def _encoded(vector: np.ndarray, how: str | None) -> list[float] | str:
    if how == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
