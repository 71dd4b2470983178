"""Pipelines played stage by stage, as references for closed forms."""

from __future__ import annotations

from collections.abc import Sequence


def round_s(encode_s: Sequence[float], decode_s: Sequence[float], num_decodes: int) -> float:
    """The seconds of an RRA round, from empty stages until its last mini-batch has left.

    Each stage computes mini-batches in the same order. A mini-batch enters a stage when it has left
    the stage before and the stage is free. A decode iteration enters the first stage when the
    mini-batch's last pass has left the last stage.

    Args:
      encode_s, decode_s: seconds of a mini-batch by stage; there are as many mini-batches.
    """
    num = len(encode_s)
    free, left = [0.0] * num, [0.0] * num
    for iteration in range(num_decodes + 1):
        for batch in range(num):
            time = left[batch]
            for stage in range(num):
                seconds = decode_s[stage] if iteration else encode_s[stage]
                time = free[stage] = max(time, free[stage]) + seconds
            left[batch] = time
    return max(left)


def decode_batch(
    encode_batch: int, period_s: float, iteration_s: tuple[float, float], lengths: Sequence[int]
) -> tuple[float, float]:
    """The mean decode batch and seconds per iteration of one decode stage beside an encode stage.

    Args:
      period_s: seconds between two encoded batches.
      iteration_s: seconds of an iteration, and more of them per sequence.
      lengths: iterations of the answers, in the order of their encoding.
    """
    left: list[int] = []
    waiting = list(lengths)
    now, next_s = 0.0, period_s
    spent = weighted = 0.0
    num_iterations = 0
    warm = len(lengths) // 10
    while waiting:
        while next_s <= now and waiting:
            left += waiting[:encode_batch]
            del waiting[:encode_batch]
            next_s += period_s
        if not left:
            now = next_s
            continue
        seconds = iteration_s[0] + iteration_s[1] * len(left)
        if len(waiting) < len(lengths) - warm:
            spent += seconds
            weighted += len(left) * seconds
            num_iterations += 1
        now += seconds
        left = [more - 1 for more in left if more > 1]
    return weighted / spent, spent / num_iterations
