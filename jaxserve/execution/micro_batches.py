"""Micro-batches of a mixed step, which pass through the stages of a model at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from jaxserve.scheduling.plan import Row


@final
@dataclass(frozen=True)
class Pass:
    """One pass of a micro-batch through all stages, in the order of submission.

    Attributes:
      slots: the slots whose tokens it computes.
      num_rows: number of rows that the stages compute, including padding.
      samples: whether the last stage samples after it.
    """

    slots: frozenset[int]
    num_rows: int
    samples: bool


def micro_batches(
    rows: Sequence[tuple[int, Row]], most: int, smallest: int
) -> Iterator[list[tuple[int, Row]]]:
    """Cut rows into at most `most` micro-batches with about the same number of tokens each.

    A row that does not fit is cut in two, of which the second part samples. The order of rows
    stays, because a row may read KV that an earlier row writes.

    Args:
      smallest: minimum number of tokens of a micro-batch, except the last.
    """
    total = sum(row.num_tokens for _, row in rows)
    size = max(smallest, -(-total // most))
    batch: list[tuple[int, Row]] = []
    left = size
    for i, row in rows:
        start, tokens = row.start, row.num_tokens
        while tokens > left:
            if left:
                batch.append((i, Row(row.slot, row.sequence_key, start, left, max_new_tokens=0)))
            yield batch
            start, tokens = start + left, tokens - left
            batch, left = [], size
        batch.append((i, Row(row.slot, row.sequence_key, start, tokens, row.max_new_tokens)))
        left -= tokens
    yield batch
