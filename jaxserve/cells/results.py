"""What a request to a cell runtime returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, final

import numpy as np

from jaxserve.core.errors import JaxserveError
from jaxserve.core.request import FinishReason, Timing


@final
@dataclass(frozen=True, kw_only=True)
class CellPiece:
    """A value of a request that is there before the request has ended.

    Attributes:
      name: name of the graph's output.
      value: the value; for `Node.steps` that of one step, and for a list that of one member.
      index: the number of the step, or of the member of the list; 0 for a single output.
    """

    name: str
    value: np.ndarray
    index: int = 0


CellSink: TypeAlias = "Callable[[CellPiece | None], None]"


@final
@dataclass(frozen=True, kw_only=True)
class CellCompletion:
    """The result of one request.

    A request that failed has `finish_reason == "error"` and the typed `error`.

    Attributes:
      values: the values of the graph's outputs by name. A cancelled or failed request has those
        that were there before.
      finish_reason: "stop"; "length" if a loop ran its `max_steps` and did not end before;
        "cancelled"; or "error".
      timing: `admitted_s` is the time at which the call with its first task could run: that of its
        submission, or of the end of the worker's call before it, if that was later. `first_token_s`
        is the time at which its first value was read.
      num_nodes: nodes of its graphs; a loop counts as one.
    """

    request_id: str
    values: Mapping[str, np.ndarray]
    finish_reason: FinishReason
    timing: Timing
    num_nodes: int
    error: JaxserveError | None = field(default=None, compare=False)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.values[name]


def failed_completion(request_id: str, error: JaxserveError, now_s: float) -> CellCompletion:
    """Return the completion of a request that was refused with an error."""
    return CellCompletion(
        request_id=request_id,
        values={},
        finish_reason="error",
        timing=Timing(arrival_s=now_s, finished_s=now_s),
        num_nodes=0,
        error=error,
    )
