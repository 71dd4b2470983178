"""Handles of submitted requests, batches of prompts, and streams of an answer's pieces."""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, final

from tqdm import tqdm

from jaxserve.core.errors import GenerationInterrupted, InvalidConfigError
from jaxserve.core.off_loop import in_thread
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.stalls import STALLS
from jaxserve.engine.answers import Piece, PieceSink
from jaxserve.engine.requests import as_batch

Params = SamplingParams | Sequence[SamplingParams] | None


class _Ended(Protocol):
    @property
    def request_id(self) -> str: ...


_C = TypeVar("_C", bound=_Ended)


@final
class Pending(Generic[_C]):
    """A submitted request. Its `future` resolves to a completion, with an error if it failed."""

    def __init__(self, request_id: str, future: Future[_C], cancel: Callable[[str], None]):
        self.request_id = request_id
        self.future = future
        self._cancel = cancel

    def __repr__(self) -> str:
        """Return the id, and whether the request has ended."""
        return f"Pending({self.request_id!r}, {'ended' if self.future.done() else 'running'})"

    @classmethod
    def ended(cls, completion: _C) -> Pending[_C]:
        future: Future[_C] = Future()
        future.set_result(completion)
        return cls(completion.request_id, future, lambda _: None)

    def result(self, timeout_s: float | None = None) -> _C:
        """Wait for the completion, and return it.

        Raises:
          TimeoutError: the request has not ended after `timeout_s` seconds; it continues.
        """
        return self.future.result(timeout_s)

    async def aresult(self) -> _C:
        """`result` for asyncio. The request continues if the waiting task is cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self.future))

    def cancel(self) -> None:
        """End the request; `result` then returns its output so far."""
        self._cancel(self.request_id)


def wait_for_all(
    pending: Sequence[Pending[_C]],
    *,
    label: str,
    unit: str,
    units_of: Callable[[_C], int],
    progress: bool,
    timeout_s: float | None = None,
) -> None:
    """Wait until every request has ended. Ctrl-C interrupts only the wait.

    After two seconds a progress bar shows `label` and a rate in `unit`, of which a completion has
    `units_of`. While a step waits for its executable it shows "compiling", and the
    rate leaves that time out.

    Raises:
      TimeoutError: a request has not ended after `timeout_s` seconds; all of them continue.
    """
    end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    done: queue.SimpleQueue[Future[_C]] = queue.SimpleQueue()
    for one in pending:
        one.future.add_done_callback(done.put)
    num_waiting, num_units = len(pending), 0
    stalled_s = STALLS.seconds()  # before
    with tqdm(
        total=num_waiting,
        desc=label,
        unit="req",
        leave=False,
        delay=2,
        miniters=0,
        disable=not progress,
    ) as bar:
        while num_waiting:
            with suppress(queue.Empty):  # the timeout lets Ctrl-C interrupt and updates the bar
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                completion = done.get(timeout=min(0.5, left_s)).result()
                num_waiting -= 1
                num_units += units_of(completion)
            bar.set_description("compiling" if STALLS.is_waiting else label, refresh=False)
            worked_s = bar.format_dict["elapsed"] - (STALLS.seconds() - stalled_s)
            bar.set_postfix_str(f"{num_units / max(worked_s, 1e-3):.0f} {unit}/s", refresh=False)
            bar.update(len(pending) - num_waiting - bar.n)


@contextmanager
def cancelled_by_ctrl_c(
    pending: Sequence[Pending[_C]], *, wait: Callable[[Sequence[Pending[_C]]], None]
) -> Iterator[None]:
    """Cancel the requests if Ctrl-C interrupts the block, and wait for their ends.

    Raises:
      GenerationInterrupted: with the completions, in place of KeyboardInterrupt.
    """
    try:
        yield
    except KeyboardInterrupt:
        for one in pending:
            one.cancel()
        wait(pending)
        raise GenerationInterrupted([one.result() for one in pending]) from None


# Function that submits a request and sends its pieces to the sink.
Start = Callable[[PieceSink], Pending[Completion]]


@final
@dataclass(frozen=True)
class PromptBatch:
    """The prompts of one call; `is_single` if the user passed one prompt instead of a list."""

    prompts: Sequence[Any]
    params: Sequence[SamplingParams]
    is_single: bool

    @classmethod
    def of(cls, prompts: Any, params: Params) -> PromptBatch:
        """Return the batch of one or several prompts, with parameters for all of them or for each.

        Raises InvalidRequestError if `prompts` is neither a prompt nor an iterable of prompts, and
        InvalidConfigError if the numbers of parameters and of prompts differ.
        """
        batch, is_single = as_batch(prompts)
        if params is None or isinstance(params, SamplingParams):
            return cls(batch, [params or SamplingParams()] * len(batch), is_single)
        if len(params) != len(batch):
            raise InvalidConfigError(
                f"{len(params)} SamplingParams for {len(batch)} prompts; pass one for all, or one "
                "each"
            )
        return cls(batch, params, is_single)

    def wait(
        self, pending: Sequence[Pending[Completion]], *, progress: bool
    ) -> Completion | list[Completion]:
        """Wait for the prompts' requests, and return their completions.

        The error of a single prompt is raised.

        Raises:
          GenerationInterrupted: Ctrl-C; the requests were cancelled.
        """
        with cancelled_by_ctrl_c(pending, wait=partial(wait, progress=False)):
            wait(pending, progress=progress)
        return self._results(pending)

    async def await_(self, pending: Sequence[Pending[Completion]]) -> Completion | list[Completion]:
        """`wait` for asyncio. Cancelling the waiting task cancels the requests."""
        try:
            await asyncio.gather(*(one.aresult() for one in pending))
        except asyncio.CancelledError:
            for one in pending:
                one.cancel()
            raise
        return self._results(pending)

    def _results(self, pending: Sequence[Pending[Completion]]) -> Completion | list[Completion]:
        done = [one.result() for one in pending]
        if not self.is_single:
            return done
        if done[0].error is not None:
            raise done[0].error
        return done[0]


async def submitted(
    submit: Callable[[], list[Pending[Completion]]], params: Sequence[SamplingParams]
) -> list[Pending[Completion]]:
    """Return the requests that `submit` submits, without blocking the event loop.

    With a grammar, which may have to be compiled, `submit` runs on another thread. If the task is
    cancelled meanwhile, so are the requests.
    """
    if not any(each.is_constrained for each in params):
        return submit()
    pending: list[Pending[Completion]] = []
    try:
        await in_thread(lambda: pending.extend(submit()))
    except BaseException:
        for one in pending:
            one.cancel()
        raise
    return pending


def wait(
    pending: Sequence[Pending[Completion]], *, progress: bool, timeout_s: float | None = None
) -> None:
    """`wait_for_all` of requests that generate."""
    wait_for_all(
        pending,
        label="generating",
        unit="tokens",
        units_of=lambda completion: sum(len(s.token_ids) for s in completion.samples),
        progress=progress,
        timeout_s=timeout_s,
    )


def read(start: Start, num_samples: int, timeout_s: float | None = None) -> Generator[Piece]:
    """Submit a request at the first `next`, and yield its pieces.

    Closing the generator early cancels the request. A request that failed raises its error after
    its last piece; TimeoutError means that it has not ended after `timeout_s` seconds.
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
