"""Records of requests that have ended, and the protocol of objects that take more of them."""

from __future__ import annotations

from typing import Protocol

from jaxserve.core.metrics import bound_outcomes
from jaxserve.core.request import Completion, Request
from jaxserve.engine.recorder import Recorder
from jaxserve.engine.stats import EngineStats


class RequestLog(Protocol):
    """A log that gets every request that began and ended, on the engine's thread."""

    def append(self, request: Request, completion: Completion, /) -> None:
        """Record the request, without blocking and without raising."""
        ...


def record_end(
    stats: EngineStats, recorder: Recorder, request: Request, completion: Completion
) -> None:
    """Record a request of an engine that has ended, and count what became of its bounds."""
    outcomes = bound_outcomes(request.params, completion)
    stats.after_end(outcomes)
    recorder.request_ended(completion, outcomes)
