"""The protocols of the search: layer costs, a deployment, and a scheduling policy's timeline."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol, TypeAlias, final

import numpy as np

from jaxserve.planning.schedules.clusters import Cluster
from jaxserve.planning.schedules.configuration import Layout, Points, Policy, Schedule
from jaxserve.planning.schedules.estimates import Best, Estimates
from jaxserve.planning.schedules.models import TransformerShape

# A number, or an array that broadcasts with the other arguments of a call.
Numbers: TypeAlias = np.ndarray | float


@final
class Phase(Enum):
    """What a layer computes: whole inputs, or one token per sequence."""

    ENCODE = "encode"
    DECODE = "decode"


class LayerCost(Protocol):
    """Seconds of a layer and of its communication. Arguments broadcast.

    No result falls when a batch, a number of tokens or a length rises; `schedules.search` finds the
    best schedule only under this condition. Batches and numbers of tokens are expected values, so
    they may be fractions.

    Attributes:
      launch_s: fixed seconds of a pass in a stage.
      batching_pays: whether no result rises faster than a batch or a number of tokens, so that
        seconds per sequence or token never rise. The search then needs fewer evaluations. Measured
        times of padded batches do not have this property.
    """

    @property
    def batching_pays(self) -> bool: ...

    @property
    def launch_s(self) -> float: ...

    def attention_s(
        self, phase: Phase, batch: Numbers, length: Numbers, degree: Numbers
    ) -> np.ndarray:
        """Return the seconds of a layer's attention on one of `degree` shards.

        Args:
          batch: sequences.
          length: tokens of each sequence to encode; positions that each token to decode attends to,
            including those of cross attention.
        """
        ...

    def rest_s(self, phase: Phase, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        """Return the seconds of a layer without its attention, on one of `degree` shards."""
        ...

    def sync_s(self, phase: Phase, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        """Return the seconds of a layer's sums over shards; 0 for one shard."""
        ...

    def join_s(self, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        """Return the seconds to project encoder outputs for a decoder layer; 0 if decoder-only."""
        ...

    def head_s(self, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        """Return the seconds from the last layer's activations to sampled tokens."""
        ...

    def handoff_s(self, num_tokens: Numbers, *, is_across: bool) -> np.ndarray:
        """Return the seconds to hand activations to the next stage.

        Args:
          is_across: whether the next stage is on another machine.
        """
        ...

    def handover_s(self, num_tokens: Numbers, num_devices: Numbers) -> np.ndarray:
        """Return the seconds to hand input tokens' KV (or encoder outputs) to WAA's decode group.

        `num_devices` is the number of sending or receiving devices, whichever is smaller.
        """
        ...


@final
@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A model on a cluster, and the costs of its layers there.

    Attributes:
      max_encode_batch: largest B_E to consider, as far as memory holds it.
      max_sequences: most sequences in memory at a time, for example an engine's slots.
      encode_margin, decode_margin: shares by which encode and decode phases may exceed their mean,
        for latencies (section 5.2: the threshold that runtime adjustment keeps).
      cost_within: costs of RRA's rounds for the smallest and the largest N_D [configurations, 1],
        if they depend on N_D: exact where the two are equal, otherwise lower limits. None to use
        `cost` for every N_D.
      overlaps_rounds: whether the first stages encode RRA's next round while later ones still
        decode, as in the paper's figure 4a. The engine does not: it reads a round's results, which
        tell how many answers have ended, before it encodes.
    """

    model: TransformerShape
    cluster: Cluster
    cost: LayerCost
    max_encode_batch: int = 16_384
    max_sequences: float = math.inf
    encode_margin: float = 0.0
    decode_margin: float = 0.0
    cost_within: Callable[[np.ndarray, np.ndarray], LayerCost] | None = None
    overlaps_rounds: bool = False

    def at(self, fewest: np.ndarray, most: np.ndarray) -> Deployment:
        """Return the deployment with its costs for ranges of N_D [configurations]."""
        if self.cost_within is None:
            return self
        return replace(self, cost=self.cost_within(fewest[:, None], most[:, None]))


@final
@dataclass(frozen=True)
class Boxes:
    """Rectangles of configurations of one layout each, with both corners included."""

    low: Points
    high: Points

    def __len__(self) -> int:
        return len(self.low)

    def __getitem__(self, which: np.ndarray | slice) -> Boxes:
        return Boxes(self.low[which], self.high[which])

    @property
    def num_points(self) -> np.ndarray:
        widths = self.high.encode_batch - self.low.encode_batch + 1
        return widths * (self.high.control - self.low.control + 1)


class Timeline(Protocol):
    """The timelines of a policy's configurations, vectorised over configurations.

    Attributes:
      layouts: those that `Points.layout` counts.
      max_encode_batch, max_control: largest values of the variables; the smallest are 1.
    """

    @property
    def layouts(self) -> tuple[Layout, ...]: ...

    @property
    def max_encode_batch(self) -> int: ...

    @property
    def max_control(self) -> int: ...

    def estimate(self, points: Points) -> Estimates:
        """Return the expected figures of configurations."""
        ...

    def boxes(self) -> Boxes:
        """Return boxes that cover all configurations, for `bound`."""
        ...

    def bound(self, boxes: Boxes) -> Best:
        """Return figures that no point of a box, or part of one from `boxes()`, can beat."""
        ...

    def schedule(self, point: Points) -> Schedule:
        """Return a single configuration in full."""
        ...


def layouts_of(policies: tuple[Policy, ...], cluster: Cluster) -> tuple[Layout, ...]:
    """Return every layout: all degrees, each on 1, 2, ... stages (section 5.1)."""
    num = cluster.num_devices
    return tuple(
        Layout(policy=policy, degree=degree, num_sharded_devices=num_sharded)
        for policy in policies
        for degree in cluster.degrees
        for num_sharded in (range(degree, num + 1, degree) if degree > 1 else (0,))
    )
