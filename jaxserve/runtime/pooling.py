"""Embeddings, classifications and rankings: requests of which the model's states are pooled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from jaxtyping import Float32

from jaxserve.core.errors import InvalidConfigError, InvalidRequestError, OtherTaskError
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.pending import PromptBatch, wait_for_all
from jaxserve.engine.requests import as_batch, kind_of, remedy_of
from jaxserve.models.config import DecoderConfig
from jaxserve.models.pooling import Labels
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.runtime.intake import Intake

# The prompt of Qwen3-Reranker (Zhang et al., arXiv:2506.05176, section 3), whose next token is
# "yes" or "no".
_QWEN3_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_ANSWERS = ("no", "yes")


@final
@dataclass(frozen=True, eq=False)
class Classification:
    """The labels of one text, or of several.

    Attributes:
      logits: float32 [texts, labels], or [labels] of one text. Of a reward model these are the
        rewards.
      probabilities: likewise; those of a model for regression are its logits.
      names: of the labels, in order.
    """

    logits: Float32[np.ndarray, "*texts labels"]
    probabilities: Float32[np.ndarray, "*texts labels"]
    names: tuple[str, ...]

    @property
    def best(self) -> Any:
        """The name of the likeliest label: a text for one text, else a list."""
        found = self.logits.argmax(-1)
        return self.names[found] if found.ndim == 0 else [self.names[i] for i in found]


@final
@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A document with its index among those given; a relevance is between 0 and 1 usually."""

    index: int
    relevance_score: float
    document: str


def check_embeds(config: DecoderConfig) -> None:
    if config.labels is not None:
        raise OtherTaskError(f"{kind_of(config)}, which has no embeddings; {remedy_of(config)}")


def labels_of(config: DecoderConfig) -> Labels:
    """Return the labels of a classifier; raise OtherTaskError for another model."""
    if config.labels is None:
        raise OtherTaskError(f"{kind_of(config)} without labels; {remedy_of(config)}")
    return config.labels


def ranking_labels(config: DecoderConfig) -> Labels:
    """Return the labels of a reranker; raise OtherTaskError for another model."""
    if config.labels is None or not config.labels.ranks:
        also = (
            ""
            if config.labels
            else ", or pass reranker='qwen3' if it is an original Qwen3-Reranker"
        )
        raise OtherTaskError(
            f"{kind_of(config)}, which does not rank documents; {remedy_of(config)}{also}"
        )
    return config.labels


def check_dimensions(dimensions: Any, config: DecoderConfig) -> None:
    is_whole = isinstance(dimensions, int) and not isinstance(dimensions, bool)
    if dimensions is not None and not (is_whole and 1 <= dimensions <= config.output_size):
        raise InvalidRequestError(
            f"dimensions={dimensions!r} is not allowed; pass a whole number of 1 to "
            f"{config.output_size}, or None for all"
        )


def as_reranker(model: Any, tokenizer: Tokenizer | None) -> Any:
    """Return a model of tokens with the labels of Qwen3-Reranker."""
    if tokenizer is None or not model.config.generates:
        raise InvalidConfigError(
            "reranker='qwen3' is for an original Qwen3-Reranker, a model of tokens with a "
            "tokenizer, and this model is not; omit reranker"
        )
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in _ANSWERS]
    if any(len(each) != 1 for each in ids):
        raise InvalidConfigError(
            "reranker='qwen3' needs a tokenizer with one token for each of 'no' and 'yes', and "
            f"this one has {ids}; omit reranker"
        )
    labels = Labels(
        names=_ANSWERS, token_ids=tuple(each for (each,) in ids), template=_QWEN3_TEMPLATE
    )
    return model.labelled(labels)


def pair_tokens(
    labels: Labels, tokenizer: Tokenizer, query: str, document: str, instruction: str | None
) -> list[int]:
    """Return the tokens of a query and a document, as the model was trained on them."""
    if labels.template is None:
        if instruction is not None:
            raise InvalidRequestError(
                f"instruction={instruction!r}, and the prompt of this model has none; omit it"
            )
        return tokenizer.encode_pair(query, document)
    given = {"instruction": instruction or _INSTRUCTION, "query": query, "document": document}
    parts, rest = [], labels.template
    for name, text in given.items():
        before, _, rest = rest.partition(f"{{{name}}}")
        parts += [before, text]
    return tokenizer.encode_parts([*parts, rest])


def embed(
    intake: Intake,
    config: DecoderConfig,
    texts: Any,
    *,
    normalize: bool | None,
    dimensions: int | None,
    adapter: str | None,
    progress: bool,
) -> Any:
    check_embeds(config)
    check_dimensions(dimensions, config)
    batch, is_single = as_batch(texts)
    pooled = _pooled(
        intake, _each(batch, intake.pooled_tokens), adapter, progress=progress, label="embedding"
    )
    found = [
        config.pooling.embedding(one, normalize=normalize, dimensions=dimensions) for one in pooled
    ]
    if is_single:
        return found[0]
    return np.stack(found) if found else np.zeros((0, dimensions or config.output_size), np.float32)


def classify(
    intake: Intake, config: DecoderConfig, texts: Any, *, adapter: str | None, progress: bool
) -> Classification:
    labels = labels_of(config)
    batch, is_single = as_batch(texts)
    tokens = [labels.without_padding(each) for each in _each(batch, intake.pooled_tokens)]
    pooled = _pooled(intake, tokens, adapter, progress=progress, label="classifying")
    logits = np.zeros((0, len(labels.names)), np.float32) if not pooled else np.stack(pooled)
    logits = logits[0] if is_single else logits
    return Classification(logits, labels.probabilities(logits), labels.names)


def rerank(
    intake: Intake,
    config: DecoderConfig,
    tokenizer: Tokenizer | None,
    query: str,
    documents: Sequence[str],
    *,
    top_n: int | None,
    instruction: str | None,
    adapter: str | None,
    progress: bool,
) -> list[Ranked]:
    labels = ranking_labels(config)
    if tokenizer is None:
        raise InvalidRequestError(
            "rerank() needs a tokenizer and this runtime has none; pass tokenizer= to Runtime"
        )
    if not isinstance(query, str) or isinstance(documents, str):
        raise InvalidRequestError(
            f"query={query!r:.40} and documents of type {type(documents).__name__}; pass a text "
            "and a list of texts"
        )
    if top_n is not None and (isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1):
        raise InvalidRequestError(
            f"top_n={top_n!r} is not allowed; pass a whole number of at least 1, or None for all"
        )

    def pair(document: Any) -> tuple[int, ...]:
        if not isinstance(document, str) or not document:
            raise InvalidRequestError(f"{document!r:.40} is not a text with characters; pass one")
        tokens = pair_tokens(labels, tokenizer, query, document, instruction)
        return labels.without_padding(intake.pooled_tokens(tokens))

    given = list(documents)
    tokens = _each(given, pair, "document")
    pooled = _pooled(intake, tokens, adapter, progress=progress, label="ranking")
    return ranked([float(labels.relevance(logits)) for logits in pooled], given, top_n)


def ranked(scores: Sequence[float], documents: Sequence[str], top_n: int | None) -> list[Ranked]:
    """Return documents by score, the highest first; equal ones in their order."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[:top_n]
    return [Ranked(index=i, relevance_score=scores[i], document=documents[i]) for i in order]


def pooled_of(completion: Completion) -> Float32[np.ndarray, " width"]:
    """Return what a request that pools returned; raise its error if it failed."""
    if completion.error is not None:
        raise completion.error
    if completion.pooled is None:
        raise InvalidRequestError(
            "a text was cancelled before it was computed: weights were updated or the runtime was "
            "paused with running='abort', or it was closed; submit it again"
        )
    return completion.pooled


def _each(
    texts: Sequence[Any], tokens_of: Callable[[Any], tuple[int, ...]], what: str = "text"
) -> list[tuple[int, ...]]:
    """Return the tokens of each text; an error names the text."""
    found = []
    for index, text in enumerate(texts):
        try:
            found.append(tokens_of(text))
        except InvalidRequestError as error:
            if len(texts) == 1:
                raise
            raise type(error)(f"{what} {index}: {error}") from error
    return found


def _pooled(
    intake: Intake,
    tokens: Sequence[tuple[int, ...]],
    adapter: str | None,
    *,
    progress: bool,
    label: str,
) -> list[np.ndarray]:
    params = SamplingParams(pools=True, adapter=adapter)
    batch = PromptBatch(tokens, [params] * len(tokens), is_single=False)
    pending = intake.submit_batch(batch)
    try:
        wait_for_all(
            pending,
            label=label,
            unit="tokens",
            units_of=lambda completion: len(completion.prompt_token_ids),
            progress=progress,
        )
    except BaseException:
        for one in pending:
            one.cancel()
        raise
    return [pooled_of(one.result()) for one in pending]
