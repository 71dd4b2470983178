"""What a serving system does at each of its batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.planning.schedules import Deployment

# Batches beyond this many sequences are tried in steps of a thousandth, smaller ones all.
_EVERY = 1024


def fitting_batches(
    deployment: Deployment, memory_bytes: Callable[[np.ndarray], np.ndarray], *, step: int = 1
) -> np.ndarray:
    """Return the batches that memory holds, in multiples of `step`, ascending.

    Args:
      memory_bytes: those in use on the fullest device with so many sequences; a straight line.
    """
    empty, one = memory_bytes(np.array([0, 1])).tolist()
    room = deployment.cluster.memory_bytes - empty
    most = min(room / max(one - empty, 1e-300), deployment.max_encode_batch)
    batch = np.arange(step, int(max(most, 0)) + 1, step)
    if step > 1:
        return batch
    thousandth = np.exp(np.arange(np.log(_EVERY), np.log(max(most, _EVERY)), 1e-3)).astype(int)
    return np.unique(np.concatenate([batch[:_EVERY], thousandth[thousandth <= most], batch[-1:]]))


@final
@dataclass(frozen=True, kw_only=True)
class Served:
    """Throughput and latency of configurations, among which the best under a bound is chosen.

    Attributes:
      batch: sequences at a time, int [sizes].
      throughput: answers per second.
      latency_s: seconds of the answer for which bounds are kept.
      tokens: prompt tokens of an iteration at most; 0 for no limit.
    """

    batch: np.ndarray
    throughput: np.ndarray
    latency_s: np.ndarray
    tokens: int | np.ndarray = 0

    @classmethod
    def joined(cls, parts: Iterable[Served]) -> Served:
        """Return the configurations of all parts."""
        every = list(parts)
        return cls(
            batch=np.concatenate([part.batch for part in every]),
            throughput=np.concatenate([part.throughput for part in every]),
            latency_s=np.concatenate([part.latency_s for part in every]),
            tokens=np.concatenate(
                [np.broadcast_to(part.tokens, part.batch.shape) for part in every]
            ),
        )

    def best_at(self, bound_s: float) -> int | None:
        """Return the index of the highest throughput under a bound; None if nothing keeps it."""
        kept = np.where(self.latency_s <= bound_s, self.throughput, 0.0)
        return int(np.argmax(kept)) if kept.any() else None

    def best(self, bound_s: float) -> float:
        """Return the highest throughput under a bound; 0 if nothing keeps it."""
        index = self.best_at(bound_s)
        return 0.0 if index is None else float(self.throughput[index])
