"""A request whose answer is still to come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import final

from jaxserve.core.request import Completion


@final
class Pending:
    """A submitted request."""

    def __init__(self, request_id: str, future: Future[Completion], cancel: Callable[[str], None]):
        self.request_id = request_id
        self.future = future
        self._cancel = cancel

    @classmethod
    def ended(cls, completion: Completion) -> Pending:
        """One that was over at once."""
        future: Future[Completion] = Future()
        future.set_result(completion)
        return cls(completion.request_id, future, lambda _: None)

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the completion. Raises TimeoutError; the request then goes on."""
        return self.future.result(timeout_s)

    async def aresult(self) -> Completion:
        """`result` for asyncio; the request goes on if its task is cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self.future))

    def cancel(self) -> None:
        """End it as it stands; `result` then returns what was generated."""
        self._cancel(self.request_id)
