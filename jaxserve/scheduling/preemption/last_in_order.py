"""The last in order goes first."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import final

from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class LastInOrder:
    """As vLLM. With `keeps_state` the KV waits on the host; otherwise it is computed anew."""

    keeps_state: bool = False

    def victim(self, candidates: Seq[Sequence]) -> Sequence:
        return candidates[-1]
