"""Handles of submitted requests, and a function that waits for them."""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, Protocol, TypeVar, final

from tqdm import tqdm


class _Ended(Protocol):
    @property
    def request_id(self) -> str: ...


_C = TypeVar("_C", bound=_Ended)


@final
class PendingRequest(Generic[_C]):
    """A submitted request. Its `future` resolves to a completion, with an error if it failed."""

    def __init__(self, request_id: str, future: Future[_C], cancel: Callable[[str], None]):
        self.request_id = request_id
        self.future = future
        self._cancel = cancel

    @classmethod
    def ended(cls, completion: _C) -> PendingRequest[_C]:
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
    pending: Sequence[PendingRequest[_C]],
    *,
    label: str,
    unit: str,
    units_of: Callable[[_C], int],
    progress: bool,
    timeout_s: float | None = None,
) -> None:
    """Wait until every request has ended. Ctrl-C interrupts only the wait.

    After two seconds a progress bar shows `label` and a rate in `unit`, of which a completion has
    `units_of`.

    Raises:
      TimeoutError: a request has not ended after `timeout_s` seconds; all of them continue.
    """
    end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    done: queue.SimpleQueue[Future[_C]] = queue.SimpleQueue()
    for one in pending:
        one.future.add_done_callback(done.put)
    num_waiting, num_units = len(pending), 0
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
            elapsed = bar.format_dict["elapsed"] or 1.0
            bar.set_postfix_str(f"{num_units / elapsed:.0f} {unit}/s", refresh=False)
            bar.update(len(pending) - num_waiting - bar.n)
