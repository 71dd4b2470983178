"""How long steps took lately."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True)
class Pace:
    """Median seconds of the newest steps of an engine.

    Attributes:
      iteration_s: an iteration of any step; a mixed step is one iteration.
      decode_s: an iteration of a decode loop; `iteration_s` if there was none.
      prefill_s: a mixed step; `iteration_s` if there was none.
    """

    iteration_s: float
    decode_s: float
    prefill_s: float

    @property
    def fastest_s(self) -> float:
        """Seconds of an iteration where no prompt is computed beside the answers."""
        return min(self.iteration_s, self.decode_s)
