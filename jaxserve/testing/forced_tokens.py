"""Made-up grammars, which allow every token and force some, for traces without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from typing import final

import numpy as np

from jaxserve.core.errors import GrammarTooComplexError
from jaxserve.core.request import Request
from jaxserve.engine.constraints import AnswerMatcher
from jaxserve.scheduling.plan import TokenMasks


@final
class ForcedTokens:
    """A `GrammarSource` whose forced tokens depend on the answer's tokens only."""

    def __init__(self, seed: int):
        self._seed = seed

    def matcher(self, request: Request) -> AnswerMatcher:
        """See `GrammarSource`."""
        return _Matcher(self._seed)

    def masks(self, rows: tuple[int, ...], matchers: Sequence[AnswerMatcher]) -> TokenMasks:
        """See `GrammarSource`; a simulation reads no masks."""
        words: Future[np.ndarray] = Future()
        words.set_result(np.full((len(rows), 1), 2**32 - 1, np.uint32))
        return TokenMasks(rows, words)


@final
class _Matcher:
    mask_s = 0.0
    is_complete = False

    def __init__(self, seed: int):
        self._seed = seed
        self._output: list[int] = []

    @property
    def error(self) -> GrammarTooComplexError | None:
        return None

    def follow(self, output: Sequence[int]) -> None:
        self._output = list(output)

    def forced(self) -> list[int]:
        rng = random.Random(f"{self._seed} forced after {self._output}")
        return [rng.randrange(1, 50) for _ in range(rng.choice([0, 0, 0, 1, 2, 9]))]

    def propose(self, tokens: Sequence[int], most: int, *, forces: bool) -> tuple[int, ...]:
        return ()
