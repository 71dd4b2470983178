"""Work that ends when its client closes the connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

_T = TypeVar("_T")


class ClientGoneError(Exception):
    """The client has closed the connection, so nothing is left to answer."""


async def unless_gone(receive: Receive, work: Awaitable[_T]) -> _T:
    """Wait for work, and cancel it if the client closes the connection before.

    It is done by the caller's task, since each further one costs turns of the event loop.

    Raises:
      ClientGoneError: the client has gone.
    """
    task = asyncio.current_task()
    assert task is not None, "it is called in a task"
    has_gone = False

    async def until_gone() -> None:
        nonlocal has_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        has_gone = True
        task.cancel()

    watch = asyncio.ensure_future(until_gone())
    try:
        return await work
    except asyncio.CancelledError:
        if has_gone and task.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        watch.cancel()
