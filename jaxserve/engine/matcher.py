"""The state of one answer in its grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any, Protocol, Self, final

import numpy as np
from jaxtyping import UInt32

from jaxserve.core.errors import AnswerTooShortError, GrammarFailedError, GrammarTooComplexError

if TYPE_CHECKING:
    from jaxserve.models.thinking import Thinking

_MAX_MESSAGE = 300


class TextDecoder(Protocol):
    """Returns the text that more tokens of an answer add."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def copy(self) -> Self: ...


@final
class Matcher:
    """Follows the tokens of one answer. One thread at a time uses it.

    The answer may not end before `min_tokens` tokens. `inner` is an `llguidance.LLMatcher` of its
    own, before the first token. `mask_s` has the seconds that its masks took on a host thread, and
    `proposed` the tokens after which it computes masks too (`propose`).
    """

    def __init__(self, inner: Any, min_tokens: int = 0, end_token_ids: Sequence[int] = ()):
        self.inner = inner
        self.is_over = False
        self.mask_s = 0.0
        self._num_tokens = 0
        self.num_before = 0  # tokens of the thinking before the answer, which `min_tokens` counts
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
            num_known = self.num_before + self._num_tokens + i
            if num_known < self._min_tokens and token in self._end_token_ids:
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
        return self.num_before + self._num_tokens < self._min_tokens

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


@final
class ThinkingMatcher:
    """Follows an answer that may think first; the grammar binds what comes after.

    While it thinks, any token is allowed except those that end the answer. After `budget` tokens of
    thinking, the tokens that end it are forced. Where the prompt leaves the decision to the model,
    the first token is one of the grammar's, or begins thinking.

    Args:
      inner: the state in the grammar; None if there is none.
      decode: returns a decoder of its tokens.
      budget: the most tokens of thinking; None for no limit.
      end_token_ids: tokens that end an answer. With a grammar it may not end inside its thinking.
    """

    def __init__(
        self,
        inner: Matcher | None,
        thinking: Thinking,
        decode: Callable[[], TextDecoder],
        budget: int | None,
        end_token_ids: Sequence[int],
    ):
        self._grammar = inner
        self._thinking = thinking
        self._decode = decode
        self._budget = budget
        self._end_token_ids = end_token_ids
        # Whether the grammar's answers have their own head, such as that of a call.
        first, self._has_head = thinking.first_ids[:1], False
        if inner is not None and first and inner.inner.try_consume_tokens(list(first)):
            inner.inner.rollback(1)
            self._has_head = True
        self._begin()

    def _begin(self) -> None:
        self._reader, self._decoder = self._thinking.reader(), self._decode()
        self._num_tokens = self._num_thinking = 0
        self._forced: list[int] = []  # that end the thinking, or precede the answer
        self._has_closed = self._is_heading = False
        # The number of tokens before those that the grammar binds; None if it does not bind yet.
        self._start: int | None = None
        self._proposed: tuple[int, ...] = ()  # while no grammar binds
        has_grammar = self._grammar is not None
        if self._grammar is not None:
            self._grammar.follow(())
        if has_grammar and self._thinking.opening == "closed":
            self._start = 0
        self._may_begin = has_grammar and self._thinking.opening == "undecided"
        self._force()

    @property
    def inner(self) -> Any:
        """The grammar's state if it counts for the next token; else None."""
        is_bound = self._grammar is not None and (self._start is not None or self._may_begin)
        return self._grammar.inner if is_bound and self._grammar and not self._forced else None

    @property
    def mask_s(self) -> float:
        return 0.0 if self._grammar is None else self._grammar.mask_s

    @property
    def proposed(self) -> tuple[int, ...]:
        if self._start is None or self._grammar is None:
            return self._proposed
        return self._grammar.proposed

    @property
    def is_complete(self) -> bool:
        is_bound = self._start is not None and self._grammar is not None
        return is_bound and self._grammar is not None and self._grammar.is_complete

    @property
    def is_over(self) -> bool:
        """Whether nothing binds the answer's further tokens: it had a budget, and has thought."""
        return self._start is not None and self._grammar is None

    @property
    def error(self) -> GrammarFailedError | GrammarTooComplexError | AnswerTooShortError | None:
        return None if self._grammar is None else self._grammar.error

    def fail(self, cause: Exception) -> None:
        if self._grammar is not None:
            self._grammar.fail(cause)

    def follow(self, output: Sequence[int]) -> None:
        """Set the answer's tokens, as `Matcher.follow` does."""
        if len(output) < self._num_tokens:
            self._begin()
        if len(output) > self._num_tokens:
            self._proposed = ()
        for token in output[self._num_tokens :]:
            self._add(token)
        if self._start is not None and self._grammar is not None:
            self._grammar.num_before = self._start
            self._grammar.follow(output[self._start :])

    def _add(self, token: int) -> None:
        self._num_tokens += 1
        if self._start is None:
            self._take(token)

    def forced(self) -> list[int]:
        """Return the tokens that must come next, one after the other."""
        if self._forced:
            return list(self._forced)
        is_bound = self._start is not None and self._grammar is not None
        return self._grammar.forced() if is_bound and self._grammar is not None else []

    def propose(self, tokens: Sequence[int], most: int, *, forces: bool) -> tuple[int, ...]:
        """Return the leading tokens that are allowed next, at most `most`.

        Those that a grammar binds are found by `Matcher.propose`. Others are free up to the token
        that ends the answer, or after which something is forced or a grammar binds: the budget
        ends the thinking at its token, and so does the model.
        """
        if self._start is not None and self._grammar is not None:
            return self._grammar.propose(tokens, most, forces=forces)
        found: list[int] = []
        if tokens and not (self._forced or self._may_begin):
            trial = self._copy()
            for token in tokens[:most]:
                if token in self._end_token_ids:
                    break
                trial._add(token)
                if trial._forced or (trial._start is not None and self._grammar is not None):
                    break
                found.append(token)
        self._proposed = tuple(found)
        return self._proposed

    def _copy(self) -> ThinkingMatcher:
        """Return a copy that may go on by itself as long as no grammar binds."""
        copied = copy(self)
        copied._reader, copied._decoder = deepcopy(self._reader), self._decoder.copy()
        return copied

    def take_masks(self, masks: UInt32[np.ndarray, "places words"], seconds: float) -> None:
        """Change masks as `Matcher.take_masks` does; all bits are set if no grammar counts."""
        if self._forced:
            masks[:] = 0
            _allow(masks[0], self._forced[0])
        elif self._start is not None and self._grammar is not None:
            self._grammar.take_masks(masks, seconds)
        elif self._may_begin and self._grammar is not None:
            self._grammar.take_masks(masks, seconds)
            first = self._thinking.start_ids[0]
            if masks[0, first // 32] >> np.uint32(first % 32) & 1:
                self._start, self._may_begin = 0, False  # the grammar's own
            _allow(masks[0], first)
        elif self._grammar is not None:
            for token in self._end_token_ids:
                if token // 32 < masks.shape[1]:
                    masks[:, token // 32] &= ~np.uint32(1 << token % 32)

    def _take(self, token: int) -> None:
        """Read a token of the thinking, or the one that decides whether there is any."""
        if self._may_begin:
            self._may_begin = False
            if token != self._thinking.start_ids[0]:
                self._start = 0
                return
            self._forced = list(self._thinking.start_ids[1:])
        elif self._forced:
            self._forced = self._forced[1:] if token == self._forced[0] else []
            if self._is_heading and not self._forced:
                self._start = self._num_tokens
                return
        self._num_thinking += self._reader.phase == "thinking"
        self._reader.push(self._decoder.push([token]))
        if self._reader.phase == "answer":
            self._start, self._forced = self._num_tokens, []
        else:
            self._force()

    def _force(self) -> None:
        """Set the tokens that must come next, unless some are left."""
        if self._forced or self._start is not None:
            return
        phase = self._reader.phase
        is_over = self._budget is not None and self._num_thinking >= self._budget
        if phase == "thinking" and is_over and not self._has_closed:
            self._forced, self._has_closed = list(self._thinking.closing_ids), True
            self._forced += self._before_answer()
        elif phase == "between" and (is_over or self._grammar is not None):
            self._forced = self._before_answer()
        elif phase == "start" and self._num_tokens == 0 and self._grammar is not None:
            first = self._thinking.first_ids
            self._forced = list(first if self._has_head else first[:1])

    def _before_answer(self) -> list[int]:
        """Return the tokens between the thinking and the answer."""
        self._is_heading = self._has_head
        return list(self._thinking.head_ids if self._has_head else self._thinking.bridge_ids)


def _allow(mask: UInt32[np.ndarray, " words"], token: int) -> None:
    mask[token // 32] |= np.uint32(1 << token % 32)


def first_line(message: str) -> str:
    """Return a message of llguidance as one line, without its dump of the grammar."""
    if message.startswith("NoExtension"):
        return "no text matches it"
    said = " ".join(message.partition("<non-verbose")[0].split())
    return said.rstrip(".;, ")[:_MAX_MESSAGE]
