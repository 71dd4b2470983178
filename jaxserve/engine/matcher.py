"""The state of one answer in its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from jaxtyping import UInt32

from jaxserve.core.errors import AnswerTooShortError, GrammarFailedError, GrammarTooComplexError

_MAX_MESSAGE = 300


@final
class Matcher:
    """Follows the tokens of one answer. One thread at a time uses it.

    The answer may not end before `min_tokens` tokens. `inner` is an `llguidance.LLMatcher` of its
    own, before the first token. `mask_s` has the seconds that its masks took on a host thread, and
    `proposed` the tokens after which it computes masks too (`propose`).
    """

    def __init__(self, inner: Any, min_tokens: int = 0, end_token_ids: Sequence[int] = ()):
        self.inner = inner
        self.mask_s = 0.0
        self._num_tokens = 0
        self._min_tokens = min_tokens
        self._end_token_ids = end_token_ids
        self._must_end = False  # too early
        self.proposed: tuple[int, ...] = ()
        self._forced_at: dict[int, int] = {}
        self._failure: Exception | None = None

    def follow(self, output: Sequence[int]) -> None:
        """Set the answer's tokens: those of the last call and more, or fewer to restart."""
        if len(output) != self._num_tokens:
            self.proposed = ()
        if len(output) < self._num_tokens:
            self.inner.reset()
            self._num_tokens = 0
            self._must_end = False
        if len(output) > self._num_tokens:
            self.inner.consume_tokens(list(output[self._num_tokens :]))
            self._num_tokens = len(output)

    def forced(self) -> list[int]:
        """Return the tokens that must come next, one after the other."""
        found = self.inner.compute_ff_tokens()
        for i, token in enumerate(found):
            if self._num_tokens + i < self._min_tokens and token in self._end_token_ids:
                return found[:i]  # the next mask has no token
        return found

    def propose(self, tokens: Sequence[int], most: int, *, forces: bool) -> tuple[int, ...]:
        """Return the leading tokens that the grammar allows next, at most `most`.

        Forced tokens follow the token before them, if it `forces`; they become output without a
        choice. A token is left out if these do not fit, or if it completes the answer.
        """
        found: list[int] = []
        forced_at: dict[int, int] = {}
        num_consumed, place = 0, 0
        while place < len(tokens) and not self._is_short and not self.inner.is_error():
            if self.inner.try_consume_tokens([tokens[place]]) != 1:
                break
            num_consumed += 1
            if self.inner.is_stopped():
                break
            forced = self.inner.compute_ff_tokens() if forces else []
            if len(found) + 1 + len(forced) > most:
                break
            if forced:
                num_consumed += self.inner.try_consume_tokens(forced)
                if self.inner.is_stopped() or num_consumed != len(found) + 1 + len(forced):
                    break
            found.append(tokens[place])
            forced_at |= {len(found) + i: token for i, token in enumerate(forced)}
            found += forced
            place += 1 + len(forced)
            if forced != list(tokens[place - len(forced) : place]):
                break
        if num_consumed:
            self.inner.rollback(num_consumed)
        self.proposed, self._forced_at = tuple(found), forced_at
        return self.proposed

    def fail(self, cause: Exception) -> None:
        self._failure = cause

    @property
    def is_complete(self) -> bool:
        """Whether the answer matches the grammar, and nothing can follow."""
        return self.inner.is_stopped() and not self.inner.is_error()

    def take_masks(self, masks: UInt32[np.ndarray, "places words"], seconds: float) -> None:
        """Forbid tokens that end the answer too early; allow all if it cannot continue.

        `masks` has the tokens that the grammar allows, a bit each, next and after each proposed
        token, and is changed in place; computing it took `seconds`. If a token is forced, it alone
        is allowed.
        """
        self.mask_s += seconds
        mask = masks[0]
        for place, token in self._forced_at.items() if self.proposed else ():
            masks[place] = 0
            masks[place, token // 32] = np.uint32(1 << token % 32)
        if self._is_short and not self.inner.is_error():
            for token in self._end_token_ids:
                mask[token // 32] &= ~np.uint32(1 << token % 32)
            self._must_end = not mask.any()
        if self.error is not None:
            masks[:] = ~np.uint32(0)

    @property
    def _is_short(self) -> bool:
        return self._num_tokens < self._min_tokens

    @property
    def error(self) -> GrammarFailedError | GrammarTooComplexError | AnswerTooShortError | None:
        """Why the answer cannot continue; None if it can."""
        if self._failure is not None:
            failed = GrammarFailedError(
                f"llguidance failed after {self._num_tokens} tokens of the answer "
                f"({type(self._failure).__name__}: {first_line(str(self._failure))}); report this "
                "with the grammar and the traceback of __cause__"
            )
            failed.__cause__ = self._failure
            return failed
        if not self.inner.is_error():
            if not self._must_end and not (self._is_short and self.inner.is_stopped()):
                return None
            return AnswerTooShortError(
                f"the answer must end after {self._num_tokens} tokens by its grammar, and "
                f"min_tokens={self._min_tokens}; lower min_tokens, or pass a grammar of longer "
                "answers"
            )
        return GrammarTooComplexError(
            f"the answer cannot go on after {self._num_tokens} tokens, since its grammar needs "
            "more time or memory than is allowed, or tokens that the model does not have: "
            f"{first_line(self.inner.get_error())}. Pass a simpler one"
        )


def first_line(message: str) -> str:
    """Return a message of llguidance as one line, without its dump of the grammar."""
    if message.startswith("NoExtension"):
        return "no text matches it"
    said = " ".join(message.partition("<non-verbose")[0].split())
    return said.rstrip(".;, ")[:_MAX_MESSAGE]
