"""The iteration shapes that carry out schedules."""

from __future__ import annotations

from typing import Any

from jaxserve.planning.schedules.configuration import Policy, Schedule
from jaxserve.planning.schedules.measured_cost import THRESHOLD
from jaxserve.scheduling.iteration.continuous import Unified
from jaxserve.scheduling.iteration.rra import RRA
from jaxserve.scheduling.iteration.waa import WAA


def iteration_of(schedule: Schedule, *, reserved_slots: int = 0) -> RRA | WAA | Unified:
    """Return the iteration shape that carries out a schedule.

    Args:
      reserved_slots: slots that only requests with bounds of their own may take.
    """
    if schedule.layout.policy is Policy.CONTINUOUS:
        return Unified(
            chunk_tokens=schedule.chunk_tokens,
            max_running=schedule.max_running,
            reserved_slots=reserved_slots,
            heeds_arrivals=True,
        )
    sizes: dict[str, Any] = {
        "encode_batch": schedule.encode_batch,
        "decode_iterations": schedule.num_decodes,
        "encode_tokens": schedule.encode_tokens,
        # Without a decode iteration no batch is kept up.
        "decode_batch": schedule.decode_batch or None,
        "threshold": THRESHOLD,
        "reserved_slots": reserved_slots,
    }
    return RRA(**sizes) if schedule.layout.policy is Policy.RRA else WAA(**sizes)
