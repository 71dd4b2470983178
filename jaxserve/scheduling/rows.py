"""Rows of a step, from the sequences that have them."""

from __future__ import annotations

from jaxserve.scheduling.plan import Row
from jaxserve.scheduling.sequence import Sequence


def row_of(
    sequence: Sequence,
    span: tuple[int, int],
    max_new_tokens: int,
    proposed: tuple[int, ...],
    *,
    is_decode_loop: bool,
) -> Row:
    """Return the row of a sequence's tokens in [start, end) of a span.

    Args:
      proposed: see `Row`.
    """
    assert sequence.slot is not None
    start, end = span
    encodes = start < sequence.request.num_encoded
    if encodes:
        end -= sequence.request.num_padding
    return Row(
        slot=sequence.slot,
        sequence_key=sequence.key,
        start=start,
        num_tokens=1 if is_decode_loop else end - start,
        max_new_tokens=max_new_tokens,
        wants_prompt_logprobs=(
            start < sequence.prompt_length - 1 and sequence.wants_prompt_logprobs
        ),
        encodes=encodes,
        proposed=proposed,
    )
