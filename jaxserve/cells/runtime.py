"""The facade of cellular batching: it owns cells, the slots of their values, and the loop."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self, final

import jax
from tqdm import tqdm

from jaxserve.cells.answers import CellAnswer, CellCompletion, CellPiece, CellSink
from jaxserve.cells.base import BaseCell
from jaxserve.cells.batchmaker import BatchMaker
from jaxserve.cells.device import DeviceCells
from jaxserve.cells.engine import CellEngine, CellStats
from jaxserve.cells.executor import CompilingExecutor
from jaxserve.cells.flat_graph import FlatGraph, flatten
from jaxserve.cells.graph import MAX_NODES, Graph
from jaxserve.cells.layout import NUM_RESERVED_SLOTS, CellLayout
from jaxserve.cells.policy import CellPolicy
from jaxserve.core.clock import Clock, WallClock
from jaxserve.core.errors import InvalidConfigError, InvalidRequestError, JaxserveError, UnfoldError
from jaxserve.core.request import Timing, check_id
from jaxserve.core.sizes import parse_bytes
from jaxserve.engine.loop import EngineLoop
from jaxserve.engine.pending import Pending, cancelled_by_ctrl_c, wait_for_all
from jaxserve.execution.compilation import start_jax
from jaxserve.kernels import dispatch
from jaxserve.report import Report

# More slots than this do not help: the host's work on that many live values takes longer.
_MAX_SLOTS = 1 << 16
_OWN_IDS = "cells-"  # which are unique
# Inputs that are unfolded, and graphs that are started, before the first of them runs.
_CHUNK = 64


@final
class CellRuntime:
    """A runtime that batches the cells of requests that arrive at any time (thesis, chapter 2).

    It is thread-safe. Use it as a context manager, or `close` it. `on_piece`, `then` and the
    callbacks of futures run on the runtime's own thread, where calls that wait for results raise
    InvalidRequestError. All calls raise RuntimeClosedError after `close`.

    Args:
      cells: every `Cell` and `Repeat` that graphs may have.
      unfold: function of one input that returns its `Graph`; it runs on the calling thread.
      devices: one worker runs on each; by default JAX's first device.
      policy: chooses tasks; by default `BatchMaker(max_tasks_to_submit=max_tasks_to_submit)`.
      max_tasks_to_submit: most tasks of one type that are submitted together, and that one call of
        an executable runs. The default is 5, as in the thesis. On CPUs it is 32, since a call costs
        more than several tasks, unless there is a `Repeat`, whose surplus steps are computed.
      max_in_flight: groups of such tasks that may be submitted to a device and not collected.
      slot_memory: memory for live values on each device, in bytes or as "256MiB".
      max_nodes: the most nodes of a graph.
      warmup: compile every executable now; otherwise each at its first use.
      progress: show progress bars for work that takes longer than two seconds.
      wrap_executor: function for tests and measurements that returns the executor to drive instead
        of the one it gets.

    Raises:
      InvalidCellError: cells of one type differ.
      InvalidConfigError: an option is not allowed.
      DeviceMemoryError: the slots do not fit.
    """

    def __init__(
        self,
        cells: Sequence[BaseCell],
        unfold: Callable[[Any], Graph],
        *,
        devices: Sequence[Any] | None = None,
        policy: CellPolicy | None = None,
        max_tasks_to_submit: int | None = None,
        max_in_flight: int = 2,
        slot_memory: int | str = "256MiB",
        max_nodes: int = MAX_NODES,
        warmup: bool = True,
        progress: bool = True,
        wrap_executor: Callable[[CompilingExecutor], CompilingExecutor] | None = None,
    ):
        devices = jax.devices()[:1] if devices is None else devices
        if max_tasks_to_submit is None:
            is_on_cpu = all(device.platform == "cpu" for device in devices)
            has_loops = any(cell.is_loop for cell in cells)
            max_tasks_to_submit = 32 if is_on_cpu and not has_loops else 5
        limits = {"max_in_flight": max_in_flight, "max_nodes": max_nodes}
        for name, value in {**limits, "max_tasks_to_submit": max_tasks_to_submit}.items():
            if value < 1:
                raise InvalidConfigError(f"{name}={value} is not allowed; pass at least 1")
        if not devices:
            raise InvalidConfigError("devices is empty; pass at least one device, or leave it out")
        self.unfold = unfold
        self.progress = progress
        start_jax()
        policy = policy or BatchMaker(max_tasks_to_submit=max_tasks_to_submit)
        layout = CellLayout(cells)
        executor: CompilingExecutor = DeviceCells(
            layout,
            devices,
            num_slots=slots_that_fit(layout, slot_memory),
            max_fused=max_tasks_to_submit,
        )
        if warmup:
            _warm_up(executor, progress=progress)
        if wrap_executor is not None:
            executor = wrap_executor(executor)
        clock = WallClock()
        self._layout = layout
        self._policy_name = policy.name
        self._clock: Clock = clock
        self._max_nodes = max_nodes
        self._engine = CellEngine(executor, policy, clock, **limits, max_admitted=_CHUNK)
        self._loop: EngineLoop[CellAnswer] = EngineLoop(self._engine, clock, name="jaxserve-cells")
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._open_ids: set[str] = set()
        # Closes a runtime that is dropped without `close`, as in notebooks.
        self._finalizer = weakref.finalize(self, _close, self._loop, executor)

    # ---- requests ----

    def generate(
        self, inputs: Iterable[Any], *, progress: bool | None = None
    ) -> list[CellCompletion]:
        """Compute a batch of inputs, and return their completions in order.

        A request that fails is a `CellCompletion` with its `error`; other requests are not
        affected.

        Args:
          progress: show a bar when it takes over two seconds; by default as the runtime.

        Raises:
          GenerationInterrupted: Ctrl-C; those that had not ended were cancelled.
          RuntimeClosedError, EngineFailedError
        """
        pending = self._submit_all(inputs)
        show = self.progress if progress is None else progress
        with cancelled_by_ctrl_c(pending, wait=partial(_wait, progress=False)):
            _wait(pending, progress=show)
        return [one.result() for one in pending]

    async def agenerate(self, inputs: Iterable[Any]) -> list[CellCompletion]:
        """`generate` for asyncio. Cancelling the task cancels its requests."""
        pending = self._submit_all(inputs)
        try:
            return await asyncio.gather(*(one.aresult() for one in pending))
        except asyncio.CancelledError:
            for one in pending:
                one.cancel()
            raise

    def submit(
        self, input: Any, *, request_id: str | None = None, on_piece: CellSink | None = None
    ) -> Pending[CellCompletion]:
        """Submit one input, and return at once.

        Args:
          request_id: unique among running requests; generated by default.
          on_piece: called with the pieces that `stream` yields and then with None, on the runtime's
            thread; it must not block.

        Raises:
          InvalidRequestError: the input cannot be computed; one of its subclasses.
          RuntimeClosedError, EngineFailedError
        """
        return self._hand_over([self._answer(input, request_id, on_piece)])[0]

    def stream(self, input: Any) -> Generator[CellPiece]:
        """Yield the values of one input as they are computed; closing it early cancels the request.

        Raises:
          JaxserveError: the request fails; raised after the last piece if it had begun.
        """
        self._check_may_wait()
        pieces: queue.SimpleQueue[CellPiece | None] = queue.SimpleQueue()
        pending = self.submit(input, on_piece=pieces.put)
        try:
            while (piece := pieces.get()) is not None:
                yield piece
        finally:
            pending.cancel()
        _raise_error(pending.result())

    async def astream(self, input: Any) -> AsyncGenerator[CellPiece]:
        """`stream` for asyncio."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[CellPiece | None] = asyncio.Queue()

        def put(piece: CellPiece | None) -> None:
            with suppress(RuntimeError):  # the event loop was closed
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        pending = self.submit(input, on_piece=put)
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
        finally:
            pending.cancel()
        _raise_error(await pending.aresult())

    def cancel(self, request_id: str) -> None:
        """End a request with the values so far; do nothing if it has ended or is unknown."""
        self._loop.cancel(request_id)

    # ---- the runtime itself ----

    def stats(self) -> CellStats:
        """Return a snapshot of the counters."""
        return replace(self._engine.stats)

    def report(self) -> Report:
        """Return the report so far, in which a task is a step and a node is a token."""
        records = self._engine.recorder.records
        about: Any = {"policy": self._policy_name, "kernels": dispatch.choices()}
        return Report(records.steps, records.requests, num_pages=0, **about)

    def check_integrity(self) -> None:
        """Check that slots and requests are consistent, between two tasks, for tests.

        Raises:
          AssertionError: they are inconsistent.
          RuntimeClosedError, EngineFailedError
        """
        self._check_may_wait()
        self._loop.ask(self._engine.check_integrity)

    def close(self) -> None:
        """Cancel every request and free the slots, but not the parameters.

        On the runtime's own thread it returns before that, and they end when the thread's current
        step is over.
        """
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit_all(self, inputs: Iterable[Any]) -> list[Pending[CellCompletion]]:
        self._check_may_wait()
        self._loop.check()
        pending: list[Pending[CellCompletion]] = []
        left = iter(inputs)
        try:
            while some := list(itertools.islice(left, _CHUNK)):
                pending += self._submit_some(some)
        except BaseException:
            for one in pending:
                one.cancel()
            raise
        return pending

    def _submit_some(self, inputs: Sequence[Any]) -> list[Pending[CellCompletion]]:
        answers: list[CellAnswer | JaxserveError] = []
        for input in inputs:
            try:
                answers.append(self._answer(input, None, None))
            except JaxserveError as error:
                answers.append(error)
        accepted = [answer for answer in answers if isinstance(answer, CellAnswer)]
        pending = iter(self._hand_over(accepted))
        return [
            next(pending) if isinstance(answer, CellAnswer) else self._refused(answer)
            for answer in answers
        ]

    def _answer(self, input: Any, request_id: str | None, sink: CellSink | None) -> CellAnswer:
        number = next(self._numbers)
        check_id(request_id, _OWN_IDS)
        now_s = self._clock.now()
        return CellAnswer(request_id or f"{_OWN_IDS}{number}", self._unfolded(input), now_s, sink)

    def _unfolded(self, input: Any) -> FlatGraph:
        try:
            graph = self.unfold(input)
        except JaxserveError:
            raise
        except Exception as error:
            raise UnfoldError(
                f"unfold raised {type(error).__name__} for an input of type "
                f"{type(input).__name__}: {error}; pass an input that it takes"
            ) from error
        flat = flatten(graph, self._layout, max_nodes=self._max_nodes)
        refusal = self._engine.refusal(flat.num_slots)
        if refusal is not None:
            raise refusal
        _ = flat.graph.links  # computed here, not on the runtime's thread
        return flat

    def _hand_over(self, answers: Sequence[CellAnswer]) -> list[Pending[CellCompletion]]:
        named = [answer for answer in answers if not answer.id.startswith(_OWN_IDS)]
        for answer in named:
            with self._lock:
                if answer.id in self._open_ids:
                    raise InvalidRequestError(
                        f"a request with the id {answer.id!r} is running; choose another id"
                    )
                self._open_ids.add(answer.id)
            answer.future.add_done_callback(partial(self._release, answer.id))
        try:
            self._loop.submit(*answers)
        except JaxserveError:
            for answer in named:
                self._release(answer.id)
            raise
        return [Pending(answer.id, answer.future, self.cancel) for answer in answers]

    def _release(self, request_id: str, _: object = None) -> None:
        with self._lock:
            self._open_ids.discard(request_id)

    def _refused(self, error: JaxserveError) -> Pending[CellCompletion]:
        now_s = self._clock.now()
        completion = CellCompletion(
            request_id="refused",
            values={},
            finish_reason="error",
            timing=Timing(arrival_s=now_s, finished_s=now_s),
            num_nodes=0,
            error=error,
        )
        return Pending.ended(completion)

    def _check_may_wait(self) -> None:
        if self._loop.is_here:
            raise InvalidRequestError(
                "this call waits for the runtime, but was made on its thread, by an on_piece, a "
                "then, or a callback of a future; make it on another thread"
            )


def slots_that_fit(layout: CellLayout, memory: int | str) -> list[int]:
    """Return the number of slots of each pool: as many of every pool as fit in the memory.

    Raises:
      InvalidConfigError: the memory holds fewer than two values of each pool.
    """
    num_bytes = parse_bytes(memory)
    row_bytes = sum(spec.num_bytes for spec in layout.pools)
    num = min(_MAX_SLOTS, num_bytes // row_bytes)
    if num < NUM_RESERVED_SLOTS + 2:
        raise InvalidConfigError(
            f"slot_memory={memory!r} holds {num} values of each shape, and "
            f"{NUM_RESERVED_SLOTS + 2} are needed; pass at least "
            f"{row_bytes * (NUM_RESERVED_SLOTS + 2)} bytes"
        )
    return [num] * len(layout.pools)


def _warm_up(executor: CompilingExecutor, *, progress: bool) -> None:
    bar = tqdm(executor.warmup_steps(), "compiling", leave=False, delay=2, disable=not progress)
    for _, compile_step in bar:
        compile_step()


def _wait(pending: Sequence[Pending[CellCompletion]], *, progress: bool) -> None:
    wait_for_all(
        pending,
        label="computing",
        unit="nodes",
        units_of=lambda completion: completion.num_nodes,
        progress=progress,
    )


def _close(loop: EngineLoop[CellAnswer], executor: CompilingExecutor) -> None:
    loop.close()
    if loop.is_here:  # the step that called this may still use the executor
        threading.Thread(target=_close, args=(loop, executor), name="jaxserve-cells-close").start()
        return
    executor.close()


def _raise_error(completion: CellCompletion) -> None:
    if completion.error is not None:
        raise completion.error
