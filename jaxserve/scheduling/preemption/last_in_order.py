"""Preempt the last in order."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import final

from jaxserve.scheduling.lengths.tracker import LengthTracker
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class LastInOrder:
    """Preempt as vLLM does. With `keeps_state` its KV goes to the host, else it is recomputed."""

    keeps_state: bool = False

    def ranked(self, candidates: Seq[Sequence], lengths: LengthTracker) -> Seq[Sequence]:
        return candidates[::-1]
