"""Forget everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class Stateless:
    """Pages are free as soon as the sequence ends."""

    def on_finish(self, sequence: Sequence) -> None:
        sequence.table.close()
