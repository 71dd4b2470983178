"""A replay buffer of recent answers that favours mispredicted ones (S3, section 3.1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Int32


@final
@dataclass(frozen=True)
class Observation:
    """One answered prompt.

    Attributes:
      tokens: the prompt as the predictor's encoder tokenizes it.
      length: number of tokens of the answer.
      bucket: the bucket of `length`.
      predicted: the bucket that was predicted as likeliest.
    """

    tokens: Int32[np.ndarray, " tokens"]
    length: int
    bucket: int
    predicted: int

    @property
    def is_wrong(self) -> bool:
        return self.bucket != self.predicted


@final
class ReplayBuffer:
    """A buffer of the newest observations, with fewer of the correctly predicted ones.

    Args:
      capacity: maximum number of observations; beyond it, the oldest is removed.
      favour: 1 or more. A full buffer keeps one in `favour` of the correctly predicted
        observations, and a sample draws each of them `favour` times less often.
    """

    def __init__(self, capacity: int, favour: float = 2.0):
        if capacity < 1 or favour < 1.0:
            raise ValueError(
                f"capacity={capacity} and favour={favour} are not allowed; pass 1 or more of both"
            )
        self.capacity = capacity
        self.favour = favour
        self._items: deque[Observation] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Observation]:
        return iter(self._items)

    def add(self, observation: Observation, random: np.random.Generator) -> None:
        """Add an observation, or drop it; deterministic given the generator's state."""
        is_full = len(self._items) == self.capacity
        if not is_full or observation.is_wrong or random.random() * self.favour < 1.0:
            self._items.append(observation)

    def sample(self, num: int, random: np.random.Generator) -> list[Observation]:
        """Draw `num` observations with replacement."""
        weights = np.asarray([self.favour if item.is_wrong else 1.0 for item in self._items])
        drawn = random.choice(len(weights), num, p=weights / weights.sum())
        return [self._items[index] for index in drawn]

    def restore(self, observations: Iterable[Observation]) -> None:
        """Replace the content by these observations, oldest first."""
        self._items = deque(observations, maxlen=self.capacity)


def pack(observations: Iterable[Observation], prefix: str) -> dict[str, np.ndarray]:
    """Return arrays for `unpack`; their names begin with `prefix`."""
    kept = list(observations)
    numbers = [(len(o.tokens), o.length, o.bucket, o.predicted) for o in kept]
    return {
        f"{prefix}_tokens": np.concatenate([np.zeros(0, np.int32), *(o.tokens for o in kept)]),
        f"{prefix}_numbers": np.asarray(numbers, np.int64).reshape(-1, 4),
    }


def unpack(arrays: Mapping[str, np.ndarray], prefix: str) -> list[Observation]:
    """Return the observations that `pack` was given."""
    numbers = arrays[f"{prefix}_numbers"]
    tokens = np.split(arrays[f"{prefix}_tokens"], np.cumsum(numbers[:, 0])[:-1])
    return [
        Observation(own, int(length), int(bucket), int(predicted))
        for own, (_, length, bucket, predicted) in zip(tokens, numbers, strict=False)
    ]
