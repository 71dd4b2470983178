"""Rows of a step, from the sequences that have them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import final

from jaxserve.scheduling.plan import Row
from jaxserve.scheduling.sequence import Sequence


@final
class Rows:
    """The rows of a step that is being planned, in order.

    Attributes:
      sequences: of each row.
      num_tokens: of all rows.
      num_proposed: tokens that the host proposes, each of which takes a row of the batch.
    """

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.num_tokens = 0
        self.num_proposed = 0
        # Of each row, beside its sequence.
        self._spans: list[tuple[int, int]] = []
        self._max_new: list[int] = []
        self._proposed: list[tuple[int, ...]] = []

    @property
    def num_taken(self) -> int:
        """Rows of the batch that are taken."""
        return len(self.sequences) + self.num_proposed

    @property
    def encodes(self) -> bool:
        """Whether an encoder computes some row."""
        pairs = zip(self.sequences, self._spans, strict=True)
        return any(start < sequence.request.num_encoded for sequence, (start, _) in pairs)

    def add(
        self,
        sequence: Sequence,
        spans: Seq[tuple[int, int]],
        max_new_tokens: int,
        proposed: tuple[int, ...],
    ) -> None:
        """Add a row for each of a sequence's spans; the last one samples and has the proposals."""
        num_before = len(spans) - 1
        self.sequences += [sequence] * len(spans)
        self._spans += spans
        self._max_new += [0] * num_before + [max_new_tokens]
        self._proposed += [()] * num_before + [proposed]
        self.num_tokens += sum(last - first for first, last in spans)
        self.num_proposed += len(proposed)

    def add_newest(self, sequence: Sequence, length: int) -> None:
        """Add the row of the last of `length` tokens, which samples one."""
        self.sequences.append(sequence)
        self._spans.append((length - 1, length))
        self._max_new.append(1)
        self._proposed.append(())
        self.num_tokens += 1

    def planned(self, *, is_decode_loop: bool) -> tuple[Row, ...]:
        """Return the rows, with the slots that their sequences have now."""
        each = zip(self.sequences, self._spans, self._max_new, self._proposed, strict=True)
        return tuple([_row(*row, is_decode_loop) for row in each])


def _row(
    sequence: Sequence,
    span: tuple[int, int],
    max_new_tokens: int,
    proposed: tuple[int, ...],
    is_decode_loop: bool,
) -> Row:
    """Return the row of a sequence's tokens in [start, end) of a span.

    Args:
      proposed: see `Row`.
    """
    assert sequence.slot is not None
    start, end = span
    if start >= sequence.prompt_length - 1:  # so it is for almost all
        num_tokens = 1 if is_decode_loop else end - start
        return Row(
            *(sequence.slot, sequence.key, start, num_tokens, max_new_tokens), proposed=proposed
        )
    encodes = start < sequence.request.num_encoded
    if encodes:
        end -= sequence.request.num_padding
    return Row(
        slot=sequence.slot,
        sequence_key=sequence.key,
        start=start,
        num_tokens=1 if is_decode_loop else end - start,
        max_new_tokens=max_new_tokens,
        wants_prompt_logprobs=sequence.wants_prompt_logprobs,
        encodes=encodes,
        proposed=proposed,
    )
