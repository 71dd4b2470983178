"""Whether a request can keep its own latency bound, as expected at its submission."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.core.errors import BoundNotMetError
from jaxserve.core.request import Request
from jaxserve.scheduling.lengths.outlook import outlooks

if TYPE_CHECKING:
    from jaxserve.scheduling.scheduler import Scheduler


def expected_late(
    scheduler: Scheduler, request: Request, iteration_s: float | None, now_s: float
) -> BoundNotMetError | None:
    """Return the error of a submitted request that is expected to miss its bound; None otherwise.

    Its outlook tells when it begins, after those before it in the policy's order, and when it ends:
    with the mean of its predicted length, or with its `max_tokens` where nothing was predicted.
    Nothing is refused before any step was timed.

    Args:
      iteration_s: seconds of one iteration; None before any step was timed.
    """
    if iteration_s is None or request.due_s is None or request.params.latency_bound is None:
        return None
    outlook = outlooks(scheduler, iteration_s).get(request.id)
    if outlook is None or outlook.ends_in_s is None or outlook.begins_in_s is None:
        return None
    passed_s = now_s - request.arrival_s
    expected_s = passed_s + outlook.ends_in_s
    if expected_s <= request.params.latency_bound:
        return None
    return BoundNotMetError(
        request.id,
        request.params.latency_bound,
        expected_s,
        outlook.num_tokens / request.params.n,
        passed_s + outlook.begins_in_s,
    )
