"""How long a decode loop may keep the host waiting."""

from __future__ import annotations

import math

from jaxserve.scheduling.policy import StepBuilder

# What it costs to begin a loop, as a share of one iteration.
_START_COST = 0.02


def decode_iterations(step: StepBuilder) -> int:
    """Return all that the device was compiled for, or fewer while sequences wait.

    A loop of N iterations costs its start, and leaves the place of an answer that ends in it unused
    for N / 2 iterations on average. With one end every L tokens of a row, both together are least
    at N = sqrt(2 * start * L). Where nothing is known of lengths, N is a quarter of the most. The
    loop is cut at the first length limit anyway.
    """
    most = step.config.max_decode_iterations
    if not step.has_waiting:
        return most
    ends = step.expected_ends(most)
    if ends is None:
        return max(1, most // 4)
    tokens_an_end = most * len(step.decoding) / max(ends[-1], 1e-9)
    return min(most, max(1, round(math.sqrt(2 * _START_COST * tokens_an_end))))
