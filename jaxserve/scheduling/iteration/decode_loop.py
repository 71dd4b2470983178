"""How long a decode loop may keep the host waiting."""

from __future__ import annotations

from jaxserve.scheduling.policy import StepBuilder


def decode_iterations(step: StepBuilder) -> int:
    """All that the device was compiled for, or a quarter while others wait for a slot or memory.

    The loop is cut at the first length limit anyway; the quarter is for those that end earlier.
    """
    most = step.config.max_decode_iterations
    return max(1, most // 4) if step.waiting else most
