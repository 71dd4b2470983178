"""What is told of requests that have ended."""

from __future__ import annotations

from typing import Protocol

from jaxserve.core.request import Completion, Request


class RequestLog(Protocol):
    """Told of every request that began and ended, on the engine's thread."""

    def append(self, request: Request, completion: Completion, /) -> None:
        """Take note, at once and without raising."""
        ...
