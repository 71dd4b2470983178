"""Log-probabilities in the forms that clients read, with the texts, bytes and offsets of tokens."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from jaxserve.core.request import TokenLogprob
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.server.schema import (
    CompletionLogprobs,
    Logprobs,
    PromptLogprob,
    PromptLogprobs,
    ScoredChoice,
    ScoredToken,
)

# JSON has no minus infinity; OpenAI's API says -9999.0 for the least likely tokens.
_LOWEST = -9999.0


def text_of(token_id: int, tokenizer: Tokenizer) -> str:
    """Return the text of one token that follows others; U+FFFD for a part of a character."""
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can represent."""
    return logprob if math.isfinite(logprob) else _LOWEST


@final
@dataclass(frozen=True)
class _Spelt:
    """A token's part of a text.

    `text` is its own text for a control token that the text leaves out; `bytes` is None for a token
    that adds nothing to the text.
    """

    text: str
    bytes: list[int] | None

    def scored(self, logprob: float) -> ScoredToken:
        return ScoredToken(token=self.text, logprob=finite(logprob), bytes=self.bytes)


@final
class LogprobFormatter:
    """A formatter of the log-probabilities of a text's tokens, as they arrive in order.

    The joined texts of the tokens are the text, and their joined bytes are its bytes. A character
    of several tokens is the text of the last of them, as in vLLM; the others add nothing.

    Args:
      after: the tokens before the text, as for `Tokenizer.stream_decoder`; None for a chat, whose
        template writes text.
      offset: number of characters before the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        after: Sequence[int] | None = None,
        skip_special_tokens: bool = True,
        offset: int = 0,
    ):
        after = tokenizer.encode("a", False) if after is None else after
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream_decoder(skip_special_tokens, after=after)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Number of characters that the decoder returned, and that tokens have as texts.
        self._num_pushed = self._num_shown = offset

    @classmethod
    def of_echo(
        cls,
        tokenizer: Tokenizer,
        given: str | Sequence[int],
        token_ids: Sequence[int],
        scores: Sequence[TokenLogprob | None],
        num_top: int,
    ) -> CompletionLogprobs:
        """Return the log-probabilities of a prompt that the answer repeats, control tokens too.

        A prompt of text leaves out the tokens that the tokenizer has put before it.
        """
        num_own = len(tokenizer.encode(given, False)) if isinstance(given, str) else len(given)
        num_added = len(token_ids) - num_own
        num_hidden = next(
            (i for i in range(num_added) if token_ids[i] not in tokenizer.control_token_ids),
            num_added,
        )
        hidden = cls(tokenizer, after=())
        shown = cls(tokenizer, after=(), skip_special_tokens=False)
        return hidden.of_completion(
            scores[:num_hidden], token_ids[:num_hidden], num_top
        ).followed_by(shown.of_completion(scores[num_hidden:], token_ids[num_hidden:], num_top))

    def of_chat(self, scores: Iterable[TokenLogprob]) -> Logprobs:
        """Return the log-probabilities of the next tokens of a message."""
        content = []
        for score in scores:
            spelt, top = self._next(score)
            content.append(
                ScoredChoice(
                    **spelt.scored(score.logprob).model_dump(),
                    top_logprobs=[one.scored(logprob) for _, one, logprob in top],
                )
            )
        return Logprobs(content=content)

    def of_completion(
        self, scores: Sequence[TokenLogprob | None], token_ids: Sequence[int], num_top: int
    ) -> CompletionLogprobs:
        """Return the log-probabilities of the next tokens; None for a token without one.

        Args:
          num_top: number of likeliest tokens per position; the position's own token is added. Of
            several with the same text, the own token keeps it and the others are named by id, as in
            vLLM.
        """
        found = CompletionLogprobs(
            tokens=[], token_logprobs=[], top_logprobs=[] if num_top else None, text_offset=[]
        )
        for score, token_id in zip(scores, token_ids, strict=True):
            found.text_offset.append(self._num_shown)
            if score is None:
                spelt, top = self._advance(token_id), None
            else:
                spelt, top = self._next(score, num_top)
            found.tokens.append(spelt.text)
            found.token_logprobs.append(finite(score.logprob) if score else None)
            if found.top_logprobs is not None:
                found.top_logprobs.append(_by_text(token_id, spelt.text, top) if top else None)
        return found

    def of_prompt(
        self, scores: Sequence[TokenLogprob | None], token_ids: Sequence[int]
    ) -> PromptLogprobs:
        """Return the log-probabilities of a prompt's tokens, in vLLM's format.

        The rank of a token is known if it is among the likeliest that were asked for.
        """
        found: PromptLogprobs = []
        for score, token_id in zip(scores, token_ids, strict=True):
            if score is None:
                self._advance(token_id)
                found.append(None)
                continue
            ranks = {each: rank for rank, (each, _) in enumerate(score.top, 1)}
            spelt, top = self._next(score)
            own = (token_id, spelt, score.logprob)
            found.append(
                {
                    str(each): PromptLogprob(
                        logprob=finite(logprob), rank=ranks.get(each), decoded_token=one.text
                    )
                    for each, one, logprob in [own, *top]
                }
            )
        return found

    def _next(
        self, score: TokenLogprob, num_top: int | None = None
    ) -> tuple[_Spelt, list[tuple[int, _Spelt, float]]]:
        """Return the next token, and the requested likeliest ones at its position with it."""
        likeliest = list(score.top[:num_top])
        if likeliest and score.token_id not in dict(likeliest):
            likeliest.append((score.token_id, score.logprob))
        others = {each: self._instead(each) for each, _ in likeliest if each != score.token_id}
        spelt = self._advance(score.token_id)
        return spelt, [(each, others.get(each, spelt), logprob) for each, logprob in likeliest]

    def _advance(self, token_id: int) -> _Spelt:
        if hidden := self._decoder.hidden(token_id):
            return _Spelt(hidden, None)
        spelt = self._tokenizer.token_bytes(token_id)
        self._utf8.decode(spelt)
        pushed = self._decoder.push([token_id])
        text = (pushed + self._decoder.kept())[self._num_shown - self._num_pushed :]
        self._num_pushed += len(pushed)
        self._num_shown += len(text)
        return _Spelt(text, list(spelt) or None)

    def _instead(self, token_id: int) -> _Spelt:
        """Return what another token would be at the position of the next one."""
        if hidden := self._decoder.hidden(token_id):
            return _Spelt(hidden, None)
        spelt = self._tokenizer.token_bytes(token_id)
        try:
            text = spelt.decode()
        except UnicodeDecodeError:  # a part of a character, which earlier tokens may have begun
            begun, _ = self._utf8.getstate()
            text = codecs.getincrementaldecoder("utf-8")("replace").decode(begun + spelt)
        return _Spelt(text, list(spelt) or None)


@final
class ContentScores:
    """The log-probabilities of a message's content, as tokens arrive in order.

    Those of the thinking before it are left out, and so are those of the white space between the
    two. If the model thinks, all are held until the content begins.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        skip = params.skip_special_tokens
        self._formatter = LogprobFormatter(tokenizer, skip_special_tokens=skip)
        self._has_begun = params.separate_reasoning is False or tokenizer.thinking is None
        self._held: list[TokenLogprob] = []
        self._num_thinking = 0

    def add(
        self, scores: Sequence[TokenLogprob], num_thinking: int, *, has_content: bool
    ) -> list[ScoredChoice]:
        """Return what tokens add.

        Args:
          num_thinking: how many more of the answer's first tokens are known to be thinking.
          has_content: whether they add to the content, or end the answer.
        """
        if self._has_begun:
            return self._formatter.of_chat(scores).content
        self._held += scores
        self._num_thinking += num_thinking
        if not has_content:
            return []
        self._has_begun = True
        scored = self._formatter.of_chat(self._held[self._num_thinking :]).content
        while self._num_thinking and scored and bytes(scored[0].bytes or ()).isspace():
            scored.pop(0)
        return scored


def _by_text(
    token_id: int, text: str, top: Sequence[tuple[int, _Spelt, float]]
) -> dict[str, float]:
    """Return the log-probabilities of the likeliest tokens by distinct texts."""
    found: dict[str, float] = {}
    for each, spelt, logprob in top:
        is_taken = each != token_id and (spelt.text == text or spelt.text in found)
        found[f"token_id:{each}" if is_taken else spelt.text] = finite(logprob)
    return found
