"""Where weights come from: one protocol for every checkpoint format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np


class WeightSource(Protocol):
    """Tensors of one checkpoint under their Hugging Face names, PyTorch orientation ([out, in]).

    `where` names the checkpoint in error messages.
    """

    where: str

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor in the checkpoint, read from headers only."""
        ...

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor, or only its part at `index` (unit steps), in its stored or dequantised dtype.

        Raises:
          CheckpointError: the data cannot be read.
        """
        ...
