"""Expected figures of schedules, and the latency bounds that they must keep."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, fields
from numbers import Real
from typing import final

import numpy as np

from jaxserve.core.errors import InvalidConfigError


@final
@dataclass(frozen=True, kw_only=True)
class Estimates:
    """Expected figures of configurations, in arrays of floats.

    Attributes:
      fits: whether the configuration fits in memory and has no stage without layers. The other
        figures ignore this.
      throughput: answers per second.
      latency_s: seconds of an answer of the percentile length, from the start of its encode phase.
      first_token_s: seconds to its first token.
      token_s: its mean seconds per decode iteration, including encode phases between iterations.
      period_s: seconds between two encode phases of `encode_batch` sequences.
      encode_s: seconds from the start of an encode phase to its end in the last stage.
      decode_batch: B_D, mean decoding sequences, for RRA at the start of a decode phase.
      memory_bytes: expected peak memory on the fullest device.
      own_share: the largest quotient of latency and bound of requests with a bound of their own; 0
        without such requests.
    """

    fits: np.ndarray
    throughput: np.ndarray
    latency_s: np.ndarray
    first_token_s: np.ndarray
    token_s: np.ndarray
    period_s: np.ndarray
    encode_s: np.ndarray
    decode_batch: np.ndarray
    memory_bytes: np.ndarray
    own_share: np.ndarray

    def __getitem__(self, which: np.ndarray | slice | int) -> Estimates:
        return Estimates(**{f.name: getattr(self, f.name)[which] for f in fields(self)})


@final
@dataclass(frozen=True, kw_only=True)
class Best:
    """For each box of configurations, figures that no fitting configuration in it can beat.

    `fits` is False if no configuration of the box fits in memory.
    """

    fits: np.ndarray
    throughput: np.ndarray
    latency_s: np.ndarray
    first_token_s: np.ndarray
    token_s: np.ndarray
    own_share: np.ndarray


@final
@dataclass(frozen=True, kw_only=True)
class LatencyBounds:
    """The latencies that a schedule must keep; `Estimates` defines them.

    Raises:
      InvalidConfigError: a bound is not a number above 0.
    """

    latency_s: float = math.inf
    first_token_s: float = math.inf
    token_s: float = math.inf

    def __post_init__(self) -> None:
        for name, bound_s in self.finite().items():
            is_number = isinstance(bound_s, Real) and not isinstance(bound_s, bool)
            if not is_number or not 0 < bound_s <= sys.float_info.max:
                raise InvalidConfigError(
                    f"{name}={bound_s!r} is not allowed; pass a number of seconds above 0"
                )

    @classmethod
    def of(
        cls,
        latency_bound: float | None = None,
        first_token_bound: float | None = None,
        token_bound: float | None = None,
    ) -> LatencyBounds:
        """Return the bounds that users give by these names; None means no bound."""
        given = dict(latency_s=latency_bound, first_token_s=first_token_bound, token_s=token_bound)
        return cls(**{name: bound_s for name, bound_s in given.items() if bound_s is not None})

    def finite(self) -> dict[str, float]:
        bounds = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: bound_s for name, bound_s in bounds.items() if bound_s != math.inf}

    def widened(self, share: float) -> LatencyBounds:
        """Return bounds that are longer by a share of each."""
        bounds = self.finite()
        return LatencyBounds(**{name: bound_s * (1 + share) for name, bound_s in bounds.items()})

    def met(self, figures: Estimates | Best) -> np.ndarray:
        """Return which configurations fit and keep all bounds, or which boxes might have one.

        Bounds of single requests count, too.
        """
        kept = figures.fits & (figures.own_share <= 1)
        for name, bound_s in self.finite().items():
            kept = kept & (getattr(figures, name) <= bound_s)
        return kept
