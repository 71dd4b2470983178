"""Generators of a completion's pieces, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import suppress

from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece, PieceSink
from jaxserve.runtime.pending import Pending, submitted

# Function that submits a request and sends its pieces to the sink.
Start = Callable[[PieceSink], Pending]


def read(start: Start, num_samples: int, timeout_s: float | None = None) -> Generator[Piece]:
    """Yield the pieces of a request, which is submitted by the first `next`.

    Closing the generator early cancels the request.

    Args:
      num_samples: number of the request's samples.

    Raises:
      JaxserveError: the request failed; raised after its last piece.
      TimeoutError: the request has not ended after `timeout_s` seconds.
    """
    end_s = _end_s(timeout_s)
    pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
    pending = start(pieces.put)
    num_open = num_samples
    try:
        while num_open:
            try:
                piece = pieces.get(timeout=_left_s(end_s))
            except queue.Empty:
                raise TimeoutError from None
            num_open = _still_open(num_open, piece)
            yield piece
    finally:
        if num_open:
            pending.cancel()
    _raise_error(pending.result(_left_s(end_s)))


async def aread(
    start: Start, params: SamplingParams, timeout_s: float | None = None
) -> AsyncGenerator[Piece]:
    """`read` for asyncio, of a request with these parameters."""
    end_s = _end_s(timeout_s)
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[Piece] = asyncio.Queue()

    def put(piece: Piece) -> None:
        with suppress(RuntimeError):  # the event loop was closed
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

    (pending,) = await submitted(lambda: [start(put)], [params])
    num_open = params.n
    try:
        while num_open:
            async with asyncio.timeout(_left_s(end_s)):
                piece = await pieces.get()
            num_open = _still_open(num_open, piece)
            yield piece
    finally:
        if num_open:
            pending.cancel()
    async with asyncio.timeout(_left_s(end_s)):
        completion = await pending.aresult()
    _raise_error(completion)


def _end_s(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _left_s(end_s: float | None) -> float | None:
    return None if end_s is None else max(0.0, end_s - time.monotonic())


def _still_open(num_open: int, piece: Piece) -> int:
    """Return the number of unfinished samples after `piece`, of `num_open` before it."""
    if piece.finish_reason == "error":
        return 0
    return num_open - (piece.finish_reason is not None)


def _raise_error(completion: Completion) -> None:
    if completion.error is not None:
        raise completion.error
