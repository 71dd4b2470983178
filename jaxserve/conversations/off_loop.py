"""Work that blocks, off asyncio's event loop, which nobody leaves while it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, suppress
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


async def to_its_end(awaitable: Awaitable[T]) -> T:
    """Its result. A task that is cancelled meanwhile waits for the end, and is cancelled then."""
    future = asyncio.ensure_future(awaitable)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # nobody else will hear of it
        raise


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a function returns that may wait for locks and disks."""
    return await to_its_end(asyncio.to_thread(function, *args, **kwargs))


@asynccontextmanager
async def entered(block: AbstractContextManager[T]) -> AsyncIterator[T]:
    """A context manager whose ends may wait; it is left whenever it was entered."""
    inside = ExitStack()
    try:
        yield await in_thread(inside.enter_context, block)
    finally:
        await in_thread(inside.close)
