"""Pages that running sequences need for their next tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import final

import numpy as np

from jaxserve.scheduling.sequence import Sequence


@final
class Growth:
    """The growth of sequences that all compute as many tokens, as it is before they do.

    Args:
      sequences: running ones, each with all of its tokens before the next one computed.
    """

    def __init__(self, sequences: Seq[Sequence], page_size: int):
        self._page_size = page_size
        self._computed = np.asarray([each.kv.num_computed for each in sequences], np.int64)
        reserved = [each.kv.table.reservation for each in sequences]
        self._reserved = np.asarray(reserved, np.int64)

    def num_missing(self, num_tokens: int) -> int:
        """Return the pages that `num_tokens` more of each take beyond their reservations."""
        pages = -(-(self._computed + num_tokens) // self._page_size)
        return int(np.maximum(pages - self._reserved, 0).sum())
