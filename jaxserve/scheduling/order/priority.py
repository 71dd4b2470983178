"""Highest priority first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class Priority:
    """By priority (higher first), then deadline (earlier first), then arrival."""

    def key(self, sequence: Sequence) -> tuple[int, float, float, int]:
        request = sequence.request
        deadline_s = math.inf if request.deadline_s is None else request.deadline_s
        return (-request.priority, deadline_s, request.arrival_s, sequence.key)
