"""Chunks in the order in which they are given up."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from typing import final

from jaxserve.memory.chunks import Chunk


@final
class Ranking:
    """Chunks by value, the lowest first; sorted anew when the lowest of the last sort are used up.

    The value of what is left changes meanwhile, by time alone: what was used since is passed over.

    Args:
      chunks: by page; the ones that `may_go` are ranked.
    """

    def __init__(
        self,
        chunks: Mapping[int, Chunk],
        may_go: Callable[[Chunk], bool],
        value: Callable[[Chunk], tuple[float, int]],
    ):
        self._chunks = chunks
        self._may_go = may_go
        self._value = value
        self._lowest: deque[tuple[Chunk, int]] = deque()

    def lowest(self) -> Chunk | None:
        """The chunk of the lowest value that may go, or None; it is not ranked any more."""
        chunk = self._next()
        if chunk is None:
            chunks = list(filter(self._may_go, self._chunks.values()))
            few = heapq.nsmallest(32 + len(chunks) // 4, chunks, key=self._value)
            self._lowest.extend((chunk, chunk.num_uses) for chunk in few)
            chunk = self._next()
        return chunk

    def put_back(self, chunk: Chunk) -> None:
        """It stays the lowest."""
        self._lowest.appendleft((chunk, chunk.num_uses))

    def _next(self) -> Chunk | None:
        while self._lowest:
            chunk, num_uses = self._lowest.popleft()
            if chunk.num_uses == num_uses and self._may_go(chunk):
                return chunk
        return None
