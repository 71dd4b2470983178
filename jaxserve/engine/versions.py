"""Versions of the weights that steps compute with, and that computed a sample's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Weights:
    """The weights of an engine.

    Attributes:
      version: 0 for the initial weights; it increases with every update.
      oldest_kept: the oldest version of the first token of a sample that continues.
    """

    version: int = 0
    oldest_kept: int = 0


@final
class TokenVersions:
    """The versions of the weights that computed the tokens of one sample, stored as changes."""

    def __init__(self, version: int):
        self._starts = [(version, 0)]

    @property
    def newest(self) -> int:
        return self._starts[-1][0]

    def change(self, version: int, num_tokens: int) -> None:
        """Record that other weights compute the tokens after the first `num_tokens`."""
        if self._starts[-1][1] == num_tokens:  # the former version computed none
            self._starts.pop()
        self._starts.append((version, num_tokens))

    def runs(self, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """Return (version, number of tokens) of the first `num_tokens` tokens, in their order."""
        ends = [*(start for _, start in self._starts[1:]), num_tokens]
        return tuple(
            (version, min(end, num_tokens) - start)
            for (version, start), end in zip(self._starts, ends, strict=True)
            if start < min(end, num_tokens)
        )
