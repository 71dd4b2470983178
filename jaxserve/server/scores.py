"""Log-probabilities in the forms that clients read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from jaxserve.core.request import TokenLogprob
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.server.schema.base import PromptLogprob, PromptLogprobs, ScoredChoice, ScoredToken
from jaxserve.server.schema.chat import Logprobs
from jaxserve.server.schema.completions import CompletionLogprobs

# JSON has no minus infinity; OpenAI's API says -9999.0 for the least likely tokens.
_LOWEST = -9999.0


def text_of(token_id: int, tokenizer: Tokenizer) -> str:
    """Return the text of one token; U+FFFD for a part of a character."""
    return tokenizer.decode([token_id], skip_special_tokens=False)


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else _LOWEST


def of_chat(scores: Iterable[TokenLogprob], tokenizer: Tokenizer) -> Logprobs:
    """Return the log-probabilities of a message's tokens."""
    return Logprobs(
        content=[
            ScoredChoice(
                **_scored(score.token_id, score.logprob, tokenizer).model_dump(),
                top_logprobs=[_scored(*each, tokenizer) for each in score.top],
            )
            for score in scores
        ]
    )


def _scored(token_id: int, logprob: float, tokenizer: Tokenizer) -> ScoredToken:
    text = text_of(token_id, tokenizer)
    whole = None if "\ufffd" in text else list(text.encode())
    return ScoredToken(token=text, logprob=finite(logprob), bytes=whole)


def of_completion(
    scores: Sequence[TokenLogprob | None],
    token_ids: Sequence[int],
    tokenizer: Tokenizer,
    *,
    with_top: bool,
    offset: int = 0,
) -> CompletionLogprobs:
    """Return the log-probabilities of a completion's tokens; None for a token without one.

    Args:
      offset: number of characters before the first token.
    """
    texts = [text_of(token_id, tokenizer) for token_id in token_ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    top = [
        {text_of(token_id, tokenizer): finite(logprob) for token_id, logprob in score.top}
        if score
        else None
        for score in scores
    ]
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[finite(score.logprob) if score else None for score in scores],
        top_logprobs=top if with_top else None,
        text_offset=offsets,
    )


def of_prompt(scores: Iterable[TokenLogprob | None], tokenizer: Tokenizer) -> PromptLogprobs:
    """Return the log-probabilities of a prompt's tokens, in vLLM's format.

    The rank of a token is known if it is among the likeliest that were asked for.
    """
    return [None if score is None else _by_id(score, tokenizer) for score in scores]


def _by_id(score: TokenLogprob, tokenizer: Tokenizer) -> dict[str, PromptLogprob]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(score.top, 1)}
    return {
        str(token_id): PromptLogprob(
            logprob=finite(logprob),
            rank=ranks.get(token_id),
            decoded_token=text_of(token_id, tokenizer),
        )
        for token_id, logprob in [(score.token_id, score.logprob), *score.top]
    }
