"""Seconds of tasks on the thesis's GPU, from its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from benchmarks.cells.applications import Sizes

# The thesis's V100 computes a step of an LSTM of 1024 for 64 rows in 185 us and for 512 in 784 us
# (2.7.3); below 64 rows the time does not change (figure 2.3).
_FLOOR_S, _FULL_S, _FULL_BATCH = 185e-6, 784e-6, 512
# With scheduling and gathering a step takes 250 us at 64 rows, and 87 % of the throughput is left
# at 512 (2.7.3).
_GATHER_S = {64: 250e-6 - _FLOOR_S, _FULL_BATCH: _FULL_S / 0.87 - _FULL_S}


def products(sizes: Sizes) -> dict[str, int]:
    """Return the floating-point operations of each cell's products for one row."""
    h = sizes.hidden_size
    lstm = 2 * 2 * h * 4 * h
    return {
        "lstm": lstm,
        "encoder": lstm,
        "decoder": lstm + 2 * h * sizes.vocab_size,
        "leaf": 2 * h * 3 * h,
        "internal": 2 * 2 * h * 5 * h,
    }


@final
@dataclass(frozen=True)
class ThesisCost:
    """The thesis's GPU: a floor of 185 us, and above it a rate of products, from its two points.

    That rate, 11 TFLOP/s, is 70 % of the V100's peak. Cells other than the LSTM have the same
    floor; the thesis gives no times for them.

    Attributes:
      gathers: whether tasks move rows, which costs what the thesis says; linear between its points.
    """

    flops: Mapping[str, int]
    gathers: bool

    def task_s(self, cell: str, batch: int) -> float:
        rate = self.flops["lstm"] * _FULL_BATCH / _FULL_S
        seconds = max(_FLOOR_S, self.flops[cell] * batch / rate)
        return seconds + gather_s(batch) if self.gathers else seconds

    def host_s(self, num_tasks: int) -> float:
        """Return nothing: the thesis's 250 us have the host's time in them."""
        return 0.0


def gather_s(batch: int) -> float:
    """Return the seconds that scheduling and gathering add to a task, after the thesis."""
    (small, at_small), (large, at_large) = _GATHER_S.items()
    return at_small + (at_large - at_small) * (batch - small) / (large - small)
