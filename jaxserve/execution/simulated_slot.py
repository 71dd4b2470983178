"""A slot of the simulated device, and the hash that its model is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from jaxserve.core.request import Request

_MASK = (1 << 61) - 1


@final
@dataclass
class SimulatedSlot:
    """What the device knows of a sequence."""

    tokens: list[int]
    request: Request
    sample_index: int
    max_length: int
    is_inert: bool = False
    page_table: dict[int, int] = field(default_factory=dict)
    num_in_state: int = 0  # tokens, of a model with states in slots

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


def mix(a: int, b: int) -> int:
    """Return a hash of two numbers."""
    value = (a * 6364136223846793005 + b * 1442695040888963407 + 1013904223) & _MASK
    return (value ^ (value >> 29)) & _MASK
