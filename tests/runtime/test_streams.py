"""A reader of an answer's pieces does not wait longer than its timeout."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest

from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece, PieceSink
from jaxserve.runtime.pending import Pending
from jaxserve.runtime.streams import aread, read

LAST = Piece(text="!", token_ids=(3,), finish_reason="stop")


def _start(sink: PieceSink) -> Pending:
    """Send the last piece but no completion, as when a replica dies in between."""
    sink(LAST)
    return Pending("r", Future(), lambda _: None)


def test_a_completion_that_never_comes_is_given_up():
    """The reader raises after the last piece."""
    pieces = read(_start, 1, timeout_s=0.05)
    assert next(pieces) == LAST
    with pytest.raises(TimeoutError):
        next(pieces)


def test_a_completion_that_never_comes_is_given_up_in_asyncio():
    """The asynchronous reader raises too."""

    async def consume() -> list[Piece]:
        seen = []
        with pytest.raises(TimeoutError):
            async for piece in aread(_start, SamplingParams(), timeout_s=0.05):
                seen.append(piece)
        return seen

    assert asyncio.run(consume()) == [LAST]
