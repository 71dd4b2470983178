"""Which graph each row of the nodes that run is of."""

from __future__ import annotations

from typing import final

import numpy as np

from jaxserve.cells.answers import Part


@final
class PartRows:
    """The part of a request that each row is of, and whether the request has begun."""

    def __init__(self) -> None:
        self._part_of: list[Part | None] = []
        # Whether each row is of a request without a submitted task.
        self._has_not_begun = np.zeros(0, np.bool_)

    def __getitem__(self, row: int) -> Part | None:
        """Return the part of a row; None if its request has ended."""
        return self._part_of[row]

    def add(self, part: Part, num_rows: int) -> None:
        """Add the rows of a part that has started.

        Args:
          num_rows: the rows that there are of all parts.
        """
        num_new = num_rows - len(self._part_of)
        if num_new > 0:
            self._part_of += [None] * num_new
            self._has_not_begun = np.append(self._has_not_begun, np.zeros(num_new, np.bool_))
        num = part.graph.num_nodes
        self._part_of[part.first_row : part.first_row + num] = [part] * num
        self._mark(part, not part.answer.has_begun)

    def remove(self, part: Part) -> None:
        """Forget the rows of a part."""
        num = part.graph.num_nodes
        self._part_of[part.first_row : part.first_row + num] = [None] * num
        if not part.answer.has_begun:
            self._mark(part, False)

    def begin(self, rows: np.ndarray) -> list[Part]:
        """Return the parts of rows whose requests begin with them."""
        new = rows[self._has_not_begun[rows]].tolist()
        found = [part for part in dict.fromkeys(map(self._part_of.__getitem__, new)) if part]
        for part in found:
            self._mark(part, False)
        return found

    def parts(self) -> list[Part]:
        """Return every part once."""
        return [part for part in dict.fromkeys(self._part_of) if part is not None]

    def _mark(self, part: Part, has_not_begun: bool) -> None:
        end = part.first_row + part.graph.num_nodes
        self._has_not_begun[part.first_row : end] = has_not_begun
