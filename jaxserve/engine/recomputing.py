"""Sequences whose KV is lost: computed anew, or failed."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from jaxserve.core.errors import HostMemoryError, StepMemoryError
from jaxserve.scheduling.plan import Row
from jaxserve.scheduling.scheduler import Progress, Scheduler

_log = logging.getLogger(__name__)


def restart_computed(scheduler: Scheduler) -> int:
    """Compute every sequence anew that has KV, on the device or the host; nothing is in flight.

    Returns:
      Tokens that were computed, and will be again.
    """
    swapped_out = (sequence for sequence in scheduler.waiting if sequence.kv.host_pages)
    computed = (*scheduler.running, *swapped_out)
    num_tokens = sum(sequence.kv.num_computed for sequence in computed)
    for sequence in computed:
        scheduler.restart(sequence, keeps_output=True)
    return num_tokens


def restart_awaiting(scheduler: Scheduler) -> None:
    """Compute anew what awaits pages from the host, before cached pages are dropped there."""
    for sequence in tuple(scheduler.running):
        if sequence.kv.awaits is not None:
            scheduler.restart(sequence, keeps_output=True)


def fail_and_restart(
    scheduler: Scheduler, news: Iterable[Progress], rows: Iterable[Row], error: Exception
) -> None:
    """Fail the sequences in rows of a step without memory, and compute all others anew.

    If it was the host's memory, none fails: without host pages they can be computed.

    Args:
      news: of the steps that were lost, this one among them.
    """
    failed = {row.sequence_key for row in rows}
    if isinstance(error, HostMemoryError):
        _log.warning("KV is not copied to the host any more: %s", error)
        failed.clear()
    out_of_memory = StepMemoryError(
        f"the device ran out of memory in a step with this request ({error}); submit it again, "
        "and pass a smaller kv_memory, max_step_tokens or max_slots if that happens again"
    )
    for sequence in {each.sequence for each in news if each.sequence.key in failed}:
        scheduler.end(sequence, "error", out_of_memory)
    for sequence in (*scheduler.running, *scheduler.waiting):
        scheduler.restart(sequence, keeps_output=True)
