"""Schedules: ExeGPT's control variables (section 4.2), expected figures, and latency bounds."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from numbers import Real
from typing import final

import numpy as np

from jaxserve.core.errors import InvalidConfigError


@final
class AllocationPolicy(Enum):
    """How prompts and answers share the devices.

    ExeGPT's policies (section 4.1) are round robin, by computation, and by memory. Continuous
    batching computes both in the same step (`scheduling.iteration.continuous.Unified`).
    """

    RRA = "rra"
    WAA_C = "waa_c"
    WAA_M = "waa_m"
    CONTINUOUS = "continuous"

    @property
    def label(self) -> str:
        """The name in tables and pictures."""
        return self.value if self.name == "CONTINUOUS" else self.value.replace("_", "-").upper()


@final
@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """A policy and its partial tensor parallelism.

    The first devices are single stages. The last `num_sharded_devices` form stages of `degree`
    shards each. Layers are distributed in proportion to devices.

    Attributes:
      degree: devices per tensor-parallel stage; 1 without tensor parallelism.
      num_sharded_devices: devices in such stages; 0 without tensor parallelism.
    """

    policy: AllocationPolicy
    degree: int = 1
    num_sharded_devices: int = 0

    def devices(self, num_devices: int) -> list[int]:
        num_sharded = self.num_sharded_devices // self.degree
        return [1] * (num_devices - self.num_sharded_devices) + [self.degree] * num_sharded


@final
@dataclass(frozen=True, kw_only=True)
class PipelineStage:
    """A pipeline stage: devices that share consecutive layers.

    Attributes:
      num_devices: tensor-parallel degree.
      num_encode_layers, num_decode_layers: 0 for a stage of another group.
    """

    num_devices: int
    num_encode_layers: int
    num_decode_layers: int


@final
@dataclass(frozen=True)
class Division:
    """The devices of an engine with two groups: `encode` for prompts, `decode` for answers."""

    encode: int
    decode: int

    def __str__(self) -> str:
        return f"{self.encode}/{self.decode}"


@final
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A configuration that a runner can carry out.

    Attributes:
      encode_batch: B_E, sequences per encode phase; 1 for continuous batching.
      encode_tokens: their mean input tokens.
      decode_batch: B_D, mean sequences of all micro-batches together; for RRA at the start of a
        decode phase.
      num_decodes: N_D, decode iterations per encode phase; for WAA, iterations of a decode step (1
        on a cluster); 0 for continuous batching.
      num_micro_batches: B_m, parts of a decode batch; for RRA the number of stages. 1 for an
        engine, whose step times cover all its stages.
      stages: in the order of the devices, WAA's encode group first. Empty for an engine.
      max_running: B of continuous batching, the most running sequences; 0 for other policies.
      chunk_tokens: most prompt tokens of a step of continuous batching; 0 for all that fit.
      division: the devices that an engine with two groups needs; None for its present ones.
    """

    layout: ParallelLayout
    encode_batch: int
    encode_tokens: float
    decode_batch: float
    num_decodes: int
    num_micro_batches: int
    stages: tuple[PipelineStage, ...]
    max_running: int = 0
    chunk_tokens: int = 0
    division: Division | None = None

    @property
    def num_encode_devices(self) -> int:
        return sum(stage.num_devices for stage in self.stages if stage.num_encode_layers)


@final
@dataclass(frozen=True)
class Points:
    """Configurations of one timeline, as arrays of ints of equal length.

    Attributes:
      layout: index into the timeline's layouts.
      encode_batch: B_E; B of continuous batching.
      control: N_D of RRA, B_m of WAA, the index of the chunk size of continuous batching. For RRA
        and WAA, throughput and latency rise as it falls.
    """

    layout: np.ndarray
    encode_batch: np.ndarray
    control: np.ndarray

    def __len__(self) -> int:
        return len(self.layout)

    def __getitem__(self, which: np.ndarray | slice) -> Points:
        return Points(self.layout[which], self.encode_batch[which], self.control[which])

    @classmethod
    def one(cls, layout: int, encode_batch: int, control: int) -> Points:
        return cls(np.array([layout]), np.array([encode_batch]), np.array([control]))


def check_families(families: Sequence[str], allowed: Sequence[str]) -> None:
    """Raise InvalidConfigError unless there is a family and each one is allowed."""
    is_list = isinstance(families, Collection) and not isinstance(families, str)
    if not is_list or not families or not all(family in allowed for family in families):
        raise InvalidConfigError(
            f"policies={families!r} is not allowed here; pass some of {tuple(allowed)}, or None "
            "for all of them"
        )


def check_num_bounds(num_bounds: int) -> None:
    """Raise InvalidConfigError if a frontier would have fewer than two bounds."""
    if num_bounds < 2:
        raise InvalidConfigError(f"num_bounds={num_bounds} is not allowed; pass at least 2")


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

    def met(self, figures: Estimates | Best) -> np.ndarray:
        """Return which configurations fit and keep all bounds, or which boxes might have one.

        Bounds of single requests count, too.
        """
        kept = figures.fits & (figures.own_share <= 1)
        for name, bound_s in self.finite().items():
            kept = kept & (getattr(figures, name) <= bound_s)
        return kept
