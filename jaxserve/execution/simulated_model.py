"""What the model of a simulated device is made of: its lengths, and a hash."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxserve.core.request import Request

END_TOKEN = 0

# (request, sample index) -> number of output tokens after which the model ends the answer
AnswerLength = Callable[[Request, int], int]
# (request, sample index, number of the sequence's tokens) -> number of tokens that its next row
# delivers, of those that it may deliver
Accepted = Callable[[Request, int, int], int]
# (request, sample index, number of output tokens) -> logits of what remains, float [buckets]
Reading = Callable[[Request, int, int], np.ndarray]

_MASK = (1 << 61) - 1


def mix(a: int, b: int) -> int:
    """Return a hash of two numbers."""
    value = (a * 6364136223846793005 + b * 1442695040888963407 + 1013904223) & _MASK
    return (value ^ (value >> 29)) & _MASK
