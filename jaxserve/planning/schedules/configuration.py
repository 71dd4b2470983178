"""What a schedule fixes: ExeGPT's control variables (section 4.2), and what comes of them."""

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

    ExeGPT's are (section 4.1) round robin, by computation, and by memory. Continuous batching
    computes prompts beside answers (`scheduling.iteration.continuous.Unified`).
    """

    RRA = "rra"
    WAA_C = "waa_c"
    WAA_M = "waa_m"
    CONTINUOUS = "continuous"


@final
@dataclass(frozen=True, kw_only=True)
class Layout:
    """A policy and its partial tensor parallelism.

    The first devices are pipeline stages of their own. The last `num_sharded_devices` form stages
    of `degree` shards each. Layers are shared out in proportion to devices.

    Attributes:
      degree: devices per tensor-parallel stage; 1 without tensor parallelism.
      num_sharded_devices: devices in such stages; 0 without tensor parallelism.
    """

    policy: Policy
    degree: int = 1
    num_sharded_devices: int = 0

    def devices(self, num_devices: int) -> list[int]:
        """Return the devices of each stage of `num_devices` devices."""
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
    """The devices of an engine with two groups.

    Attributes:
      encode: devices that compute prompts.
      decode: devices that compute answers.
    """

    encode: int
    decode: int

    def __str__(self) -> str:
        return f"{self.encode}/{self.decode}"


@final
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A configuration that a runner can carry out.

    Attributes:
      encode_batch: B_E, sequences per encode phase.
      encode_tokens: their input tokens, on average.
      decode_batch: B_D, sequences of all micro-batches together, on average; for RRA at the start
        of a decode phase.
      num_decodes: N_D, decode iterations per encode phase; for WAA, iterations of a decode step (1
        on a cluster).
      num_micro_batches: B_m, parts of a decode batch; for RRA the number of stages. 1 for an
        engine, whose step times are those of all its stages.
      stages: in the order of the devices; WAA's encode group comes first. Empty for an engine.
      max_running: B of continuous batching, the most sequences that run at once; 0 for others.
        Continuous batching has no B_E and N_D: `encode_batch` is 1 and `num_decodes` 0.
      chunk_tokens: prompt tokens of a step of continuous batching at most; 0 for all that fit.
      division: the devices that an engine with two groups needs for it; None for those it has.
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
        """Devices with encode layers."""
        return sum(stage.num_devices for stage in self.stages if stage.num_encode_layers)


@final
@dataclass(frozen=True)
class Points:
    """Configurations of one timeline, as arrays of ints of equal length.

    Attributes:
      layout: index into the timeline's layouts.
      encode_batch: B_E.
      control: the policy's own variable: N_D of RRA, B_m of WAA. In both, throughput and latency
        rise as it falls. Continuous batching has B as `encode_batch`, and the size of its chunks
        as `control`.
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
        """Return a single configuration."""
        return cls(np.array([layout]), np.array([encode_batch]), np.array([control]))


def check_families(families: Sequence[str], allowed: Sequence[str]) -> None:
    """Check that there are families, and that each is one of those allowed.

    Raises:
      InvalidConfigError
    """
    is_list = isinstance(families, Collection) and not isinstance(families, str)
    if not is_list or not families or not all(family in allowed for family in families):
        raise InvalidConfigError(
            f"policies={families!r} is not allowed here; pass some of {tuple(allowed)}, or None "
            "for all of them"
        )


def check_num_bounds(num_bounds: int) -> None:
    """Check a number of bounds of a frontier.

    Raises:
      InvalidConfigError: it is below 2.
    """
    if num_bounds < 2:
        raise InvalidConfigError(f"num_bounds={num_bounds} is not allowed; pass at least 2")
