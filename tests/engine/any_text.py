"""A source of grammars that allow every text."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from jaxserve.core.request import Request
from jaxserve.scheduling.plan import TokenMasks


class AnyMatcher:
    """Allows every token, proposes none, and keeps how many it might have proposed."""

    mask_s = 0.0
    is_complete = False
    error = None

    def __init__(self, shares: list[int], most: int | None):
        self._shares = shares
        self._most = most
        self.is_over = False

    def follow(self, output: Sequence[int]) -> None:
        self.is_over = self._most is not None and len(output) >= self._most

    def forced(self) -> list[int]:
        return []

    def propose(self, tokens: Sequence[int], most: int, *, forces: bool) -> tuple[int, ...]:
        if most:
            self._shares.append(most)
        return ()


class AnyText:
    """See `constraints.GrammarSource`. Nothing binds an answer after its first `most` tokens.

    Attributes:
      shares: how many tokens matchers might have proposed, one number a call.
      num_masks: how often masks were made.
    """

    def __init__(self, most: int | None = None) -> None:
        self.shares: list[int] = []
        self.num_masks = 0
        self._most = most
        self._matchers: weakref.WeakSet[AnyMatcher] = weakref.WeakSet()

    @property
    def num_matchers(self) -> int:
        """Matchers that are held by anyone."""
        return len(self._matchers)

    def matcher(self, request: Request) -> AnyMatcher:
        matcher = AnyMatcher(self.shares, self._most)
        self._matchers.add(matcher)
        return matcher

    def masks(self, rows: tuple[int, ...], matchers: Sequence[AnyMatcher]) -> TokenMasks:
        self.num_masks += 1
        words: Future[np.ndarray] = Future()
        words.set_result(np.full((len(rows), 1), 2**32 - 1, np.uint32))
        return TokenMasks(rows, words)
