"""A request whose answer is still to come."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from jaxserve.core.request import Completion
from jaxserve.engine.answers import Answer


@final
class Pending:
    """A submitted request."""

    def __init__(self, answer: Answer, cancel: Callable[[str], None]):
        self._answer = answer
        self._cancel = cancel

    @property
    def request_id(self) -> str:
        return self._answer.request.id

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the completion. Raises TimeoutError; the request then goes on."""
        return self._answer.future.result(timeout_s)

    def cancel(self) -> None:
        """End it as it stands; `result` then returns what was generated."""
        self._cancel(self.request_id)
