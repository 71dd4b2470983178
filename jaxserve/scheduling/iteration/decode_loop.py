"""How long a decode loop may keep the host waiting."""

from __future__ import annotations

import math

from jaxserve.scheduling.policy import StepBuilder

# What it costs to begin a loop, as a share of one iteration.
_START_COST = 0.02
# The same in seconds, where no sequence waits: less than the 2 ms that were measured on a host with
# two cores that are the device, too, and more than on a device that works while the host plans.
_START_S = 0.001
# A request that comes waits for half of a loop, and for one that was submitted behind it.
_LOOPS_BEFORE = 1.5


def decode_iterations(step: StepBuilder, *, heeds_arrivals: bool = False) -> int:
    """Return all that the device was compiled for, or fewer while sequences wait or come.

    A loop of N iterations costs its start, and leaves the place of an answer that ends in it unused
    for N / 2 iterations on average. With one end every L tokens of a row, both together are least
    at N = sqrt(2 * start * L). Where nothing is known of lengths, N is a quarter of the most. The
    loop is cut at the first length limit anyway.

    Args:
      heeds_arrivals: return fewer while others come, too, see `_before_arrivals`.
    """
    most = step.config.max_decode_iterations
    if not step.has_waiting:
        return _before_arrivals(step) if heeds_arrivals else most
    ends = step.expected_ends(most)
    if ends is None:
        return max(1, most // 4)
    tokens_an_end = most * len(step.decoding) / max(ends[-1], 1e-9)
    return min(most, max(1, round(math.sqrt(2 * _START_COST * tokens_an_end))))


def _before_arrivals(step: StepBuilder) -> int:
    """Return the iterations of a loop while requests come to be computed beside those that run.

    A loop of N iterations of t seconds delays each of its B sequences by its start, s / N an
    iteration. It delays those that come, r a second, by 1.5 N t, so 1.5 r N t^2 an iteration. Both
    together are least at N = sqrt(B s / (1.5 r)) / t.
    """
    expected = step.expected_arrivals()
    if expected is None:
        return step.config.max_decode_iterations
    rate, iteration_s = expected
    num = math.sqrt(len(step.decoding) * _START_S / (_LOOPS_BEFORE * rate)) / max(iteration_s, 1e-9)
    return max(1, round(min(num, step.config.max_decode_iterations)))
