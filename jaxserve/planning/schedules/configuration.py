"""Configurations of a schedule: ExeGPT's control variables (section 4.2) and derived values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import final

import numpy as np

from jaxserve.core.errors import InvalidConfigError


@final
class Policy(Enum):
    """How prompts and answers share the devices.

    ExeGPT's policies (section 4.1) are round robin, by computation, and by memory. Continuous
    batching computes both in the same step (`scheduling.iteration.continuous.Unified`).
    """

    RRA = "rra"
    WAA_C = "waa_c"
    WAA_M = "waa_m"
    CONTINUOUS = "continuous"


@final
@dataclass(frozen=True, kw_only=True)
class Layout:
    """A policy and its partial tensor parallelism.

    The first devices are single stages. The last `num_sharded_devices` form stages of `degree`
    shards each. Layers are distributed in proportion to devices.

    Attributes:
      degree: devices per tensor-parallel stage; 1 without tensor parallelism.
      num_sharded_devices: devices in such stages; 0 without tensor parallelism.
    """

    policy: Policy
    degree: int = 1
    num_sharded_devices: int = 0

    def devices(self, num_devices: int) -> list[int]:
        num_sharded = self.num_sharded_devices // self.degree
        return [1] * (num_devices - self.num_sharded_devices) + [self.degree] * num_sharded


@final
@dataclass(frozen=True, kw_only=True)
class Stage:
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

    layout: Layout
    encode_batch: int
    encode_tokens: float
    decode_batch: float
    num_decodes: int
    num_micro_batches: int
    stages: tuple[Stage, ...]
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
