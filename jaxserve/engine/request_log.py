"""The protocol of objects that record requests that have ended."""

from __future__ import annotations

from typing import Protocol

from jaxserve.core.request import Completion, Request


class RequestLog(Protocol):
    """A log that gets every request that began and ended, on the engine's thread."""

    def append(self, request: Request, completion: Completion, /) -> None:
        """Record the request, without blocking and without raising."""
        ...
