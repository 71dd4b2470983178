"""A turn's pieces on the way to a client that waits: the status, comments, errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from jaxserve.core.errors import TurnCancelledError
from jaxserve.engine.answers import Piece
from jaxserve.server.exchange import Group
from jaxserve.server.turn import Relay


def _piece(text: str) -> Piece:
    return Piece(text=text, token_ids=(1,))


def test_a_turn_that_waits_has_its_status_and_comments():
    """A turn without a piece begins its stream after a time, and has news from time to time."""

    async def read() -> list[Group]:
        go_on = asyncio.Event()

        async def turn() -> AsyncGenerator[Group]:
            await go_on.wait()
            yield [(0, _piece("a"))]
            yield [(0, _piece("b"))]

        relay, found = Relay(turn(), status_s=0.01, ping_s=0.01), []
        async for group in relay.groups():
            found.append(group)
            if len(found) == 2:
                go_on.set()
        return found

    found = asyncio.run(read())
    assert found[:2] == [[], []]
    assert "".join(piece.text for group in found for _, piece in group) == "ab"


@pytest.mark.parametrize("has_begun", [False, True])
def test_errors_of_turns_come_after_their_pieces(has_begun: bool):
    """An error before the first piece has its own status, a later one ends the stream."""

    async def turn() -> AsyncGenerator[Group]:
        if has_begun:
            yield [(0, _piece("a"))]
            await asyncio.sleep(0.01)
        raise TurnCancelledError("cancelled")

    async def read() -> list[Group]:
        relay, found = Relay(turn()), []
        with pytest.raises(TurnCancelledError):
            async for group in relay.groups():
                found += group
        return found

    assert len(asyncio.run(read())) == has_begun


def test_a_client_that_leaves_ends_the_turn():
    """Closing the relay closes the turn, also where its first piece was not asked for."""

    async def leave() -> bool:
        has_ended = asyncio.Event()

        async def turn() -> AsyncGenerator[Group]:
            try:
                await asyncio.sleep(60)
                yield []
            finally:
                has_ended.set()

        relay = Relay(turn())
        await asyncio.sleep(0.01)
        relay.close()
        await asyncio.wait_for(has_ended.wait(), 5)
        return True

    assert asyncio.run(leave())
