"""From the rows of a plan to the arrays of a mixed step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.core.config import EngineConfig, bucket
from jaxserve.scheduling.plan import Needs, Row
from jaxserve.steps.functions import MixedBatch
from jaxserve.steps.sampling.sampler import SamplingNeeds


def sampling_first(rows: Sequence[Row]) -> list[int]:
    """Indices of the rows, those that sample before the others."""
    return sorted(range(len(rows)), key=lambda i: not rows[i].samples)


def pack_rows(
    config: EngineConfig, rows: Sequence[Row], num_tokens: int | None = None
) -> tuple[MixedBatch, list[int]]:
    """The batch of these rows (NumPy arrays), and where in it each row's tokens begin.

    Args:
      num_tokens: of the batch; by default the smallest compiled size that holds the rows.
    """
    num_slots = config.max_slots
    size = num_tokens or bucket(max(1, sum(row.num_tokens for row in rows)), config.token_buckets)
    token_row = np.full(size, num_slots, np.int32)
    slot, start, query_start, length = np.zeros((4, num_slots), np.int32)
    used = 0
    starts = []
    for i, row in enumerate(rows):
        token_row[used : used + row.num_tokens] = i
        slot[i], start[i], query_start[i], length[i] = row.slot, row.start, used, row.num_tokens
        starts.append(used)
        used += row.num_tokens
    # NumPy in place of the device arrays that jit makes of them.
    batch: Any = MixedBatch(token_row, slot, start, query_start, length)  # pyright: ignore[reportArgumentType]
    return batch, starts


def pack_sampling(config: EngineConfig, rows: Sequence[Row]) -> np.ndarray:
    """Slots of the rows that sample, which come first; padded to a compiled size (int32)."""
    slots = [row.slot for row in rows if row.samples]
    index = np.full(bucket(len(slots), config.head_buckets), config.max_slots, np.int32)
    index[: len(slots)] = slots
    return index


def pack_needs(needs: Needs) -> SamplingNeeds:
    """The same, as arrays of a step."""
    flags: dict[str, Any] = {name: np.bool_(value) for name, value in vars(needs).items()}
    return SamplingNeeds(**flags)
