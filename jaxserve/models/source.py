"""The protocol of weight sources, one for every checkpoint format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np


class WeightSource(Protocol):
    """The tensors of a checkpoint by Hugging Face name, in PyTorch's orientation ([out, in]).

    `where` names the checkpoint in error messages.
    """

    where: str

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor in the checkpoint; reads headers only."""
        ...

    def dtypes(self) -> Mapping[str, str]:
        """Return the stored type of every tensor by the format's name of it, such as "BF16"."""
        ...

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return a tensor, or its part at `index` (unit steps), in its stored or dequantised dtype.

        Raises:
          CheckpointError: the data cannot be read.
        """
        ...
