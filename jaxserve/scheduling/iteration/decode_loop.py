"""How long a decode loop may keep the host waiting."""

from __future__ import annotations

from jaxserve.scheduling.policy import StepBuilder


def decode_iterations(step: StepBuilder) -> int:
    """Return all that the device was compiled for, or fewer while sequences wait.

    Then they are as many as are expected to end half an answer, whose place another could take; a
    quarter where nothing is known of lengths. The loop is cut at the first length limit anyway.
    """
    most = step.config.max_decode_iterations
    if not step.has_waiting:
        return most
    ends = step.expected_ends(most)
    if ends is None:
        return max(1, most // 4)
    return max(1, sum(ended <= 0.5 for ended in ends))
