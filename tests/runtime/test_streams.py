"""What reads an answer's pieces waits no longer than it was told to."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest

from jaxserve.engine.answers import Piece, PieceSink
from jaxserve.runtime.pending import Pending
from jaxserve.runtime.streams import aread, read

LAST = Piece(text="!", token_ids=(3,), finish_reason="stop")


def _start(sink: PieceSink) -> Pending:
    """The last piece comes, and its completion never does, as where a replica dies in between."""
    sink(LAST)
    return Pending("r", Future(), lambda _: None)


def test_a_completion_that_never_comes_is_given_up():
    """After the last piece was read."""
    pieces = read(_start, 1, timeout_s=0.05)
    assert next(pieces) == LAST
    with pytest.raises(TimeoutError):
        next(pieces)


def test_a_completion_that_never_comes_is_given_up_in_asyncio():
    """Likewise."""

    async def consume() -> list[Piece]:
        seen = []
        with pytest.raises(TimeoutError):
            async for piece in aread(_start, 1, timeout_s=0.05):
                seen.append(piece)
        return seen

    assert asyncio.run(consume()) == [LAST]
