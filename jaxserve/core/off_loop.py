"""Runs blocking calls on threads outside asyncio's event loop, always to completion."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, suppress
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


async def to_its_end(awaitable: Awaitable[T]) -> T:
    """Return the result of `awaitable`. A task that is cancelled meanwhile waits for it first."""
    future = asyncio.ensure_future(awaitable)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # marks it as retrieved
        raise


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of a function that may wait for locks and disks, run on a thread."""
    return await to_its_end(asyncio.to_thread(function, *args, **kwargs))


@asynccontextmanager
async def entered(block: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave a context manager that may block. It is left whenever it was entered."""
    inside = ExitStack()
    try:
        yield await in_thread(inside.enter_context, block)
    finally:
        await in_thread(inside.close)
