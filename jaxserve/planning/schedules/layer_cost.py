"""Costs of a layer, deployments, and pipelines: seconds of a pass, and memory."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Protocol, TypeAlias, final

import numpy as np

from jaxserve.planning.schedules.cluster import Cluster, LayerShape, TransformerShape
from jaxserve.planning.schedules.schedule import (
    AllocationPolicy,
    Best,
    Estimates,
    ParallelLayout,
    PipelineStage,
    Points,
    Schedule,
)

# A number, or an array that broadcasts with the other arguments of a call.
Numbers: TypeAlias = np.ndarray | float


@final
class LayerPhase(Enum):
    """What a layer computes: whole inputs, or one token per sequence."""

    ENCODE = "encode"
    DECODE = "decode"


class LayerCost(abc.ABC):
    """Seconds of a layer and of its communication, by default without any. Arguments broadcast.

    No result falls when a batch, a number of tokens or a length rises; `schedules.search` finds the
    best schedule only under this condition. Batches and numbers of tokens are expected values, so
    they may be fractions.

    Attributes:
      launch_s: fixed seconds of a pass in a stage.
      batching_pays: whether no result rises faster than a batch or a number of tokens, so that
        seconds per sequence or token never rise. The search then needs fewer evaluations. Measured
        times of padded batches do not have this property.
    """

    batching_pays: bool = False

    @property
    def launch_s(self) -> float:
        return 0.0

    @abc.abstractmethod
    def attention_s(
        self, phase: LayerPhase, batch: Numbers, length: Numbers, degree: Numbers
    ) -> np.ndarray:
        """Return the seconds of a layer's attention on one of `degree` shards.

        Args:
          length: tokens of each sequence to encode; positions that each token to decode attends to,
            including those of cross attention.
        """

    @abc.abstractmethod
    def rest_s(self, phase: LayerPhase, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        """Return the seconds of a layer without its attention, on one of `degree` shards."""

    def sync_s(self, phase: LayerPhase, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        """Return the seconds of a layer's sums over shards; 0 for one shard."""
        return np.zeros(np.broadcast(num_tokens, degree).shape)

    def join_s(self, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        """Return the seconds to project encoder outputs for a decoder layer; 0 if decoder-only."""
        return np.zeros(np.broadcast(num_tokens, degree).shape)

    def head_s(self, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        """Return the seconds from the last layer's activations to sampled tokens."""
        return np.zeros(np.broadcast(num_tokens, degree).shape)

    def handoff_s(self, num_tokens: Numbers, *, is_across: bool) -> np.ndarray:
        """Return the seconds to hand activations to the next stage.

        Args:
          is_across: whether the next stage is on another machine.
        """
        return np.zeros(np.shape(num_tokens))

    def handover_s(self, num_tokens: Numbers, num_devices: Numbers) -> np.ndarray:
        """Return the seconds to hand input tokens' KV (or encoder outputs) to WAA's decode group.

        `num_devices` is the number of sending or receiving devices, whichever is smaller.
        """
        return np.zeros(np.broadcast(num_tokens, num_devices).shape)


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
    """

    model: TransformerShape
    cluster: Cluster
    cost: LayerCost
    max_encode_batch: int = 16_384
    max_sequences: float = math.inf
    encode_margin: float = 0.0
    decode_margin: float = 0.0
    cost_within: Callable[[np.ndarray, np.ndarray], LayerCost] | None = None

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

    @classmethod
    def whole(cls, num_layouts: int, max_encode_batch: int, max_control: int) -> Boxes:
        """Return one box for each layout, with all its configurations."""
        layouts = np.arange(num_layouts)
        ones = np.ones_like(layouts)
        return cls(
            Points(layouts, ones, ones),
            Points(layouts, ones * max_encode_batch, ones * max_control),
        )

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
    def layouts(self) -> tuple[ParallelLayout, ...]: ...

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


def layouts_of(
    policies: tuple[AllocationPolicy, ...], cluster: Cluster
) -> tuple[ParallelLayout, ...]:
    """Return every layout: all degrees, each on 1, 2, ... stages (section 5.1)."""
    num = cluster.num_devices
    return tuple(
        ParallelLayout(policy=policy, degree=degree, num_sharded_devices=num_sharded)
        for policy in policies
        for degree in cluster.degrees
        for num_sharded in (range(degree, num + 1, degree) if degree > 1 else (0,))
    )


@final
@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Stages that together hold a number of layers, for many layouts: int arrays of one shape.

    Attributes:
      first_device: index of the first device; machines begin at multiples of their size.
      num_single: stages of one device, which come first.
      num_sharded: stages of `degree` devices, which follow.
      num_across: boundaries between stages that are also boundaries between machines.
    """

    num_single: np.ndarray
    num_sharded: np.ndarray
    degree: np.ndarray
    num_across: np.ndarray

    @classmethod
    def of(
        cls,
        num_devices: np.ndarray,
        num_sharded_devices: np.ndarray,
        degree: np.ndarray,
        *,
        first_device: np.ndarray | int,
        devices_per_machine: int,
    ) -> Pipeline:
        last_device = first_device + num_devices - 1
        num_across = last_device // devices_per_machine - first_device // devices_per_machine
        return cls(
            num_single=num_devices - num_sharded_devices,
            num_sharded=num_sharded_devices // degree,
            degree=degree,
            num_across=np.asarray(num_across),
        )

    @classmethod
    def of_layouts(cls, layouts: Sequence[ParallelLayout], cluster: Cluster) -> Pipeline:
        """Return the pipelines whose stages are all devices of a cluster."""
        return cls.of(
            np.full(len(layouts), cluster.num_devices),
            np.array([layout.num_sharded_devices for layout in layouts]),
            np.array([layout.degree for layout in layouts]),
            first_device=0,
            devices_per_machine=cluster.devices_per_machine,
        )

    def __getitem__(self, which: object) -> Pipeline:
        return Pipeline(**{f.name: getattr(self, f.name)[which] for f in fields(self)})

    @property
    def num_stages(self) -> np.ndarray:
        return self.num_single + self.num_sharded

    @property
    def num_devices(self) -> np.ndarray:
        return self.num_single + self.num_sharded * self.degree

    def most_layers(self, num_layers: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the most layers of a single device, and of a sharded stage; 0 without stages."""
        num = self.num_devices
        single = -(-num_layers // num) * (self.num_single > 0)
        sharded = -(-num_layers * self.degree // num) * (self.num_sharded > 0)
        return single, sharded

    def pass_s(
        self,
        cost: LayerCost,
        phase: LayerPhase,
        num_layers: int,
        *,
        batch: np.ndarray,
        length: Numbers,
        num_tokens: np.ndarray,
        num_head_tokens: np.ndarray | None,
        pieces: tuple[Numbers, Numbers] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of a pass in the slowest stage, and through all; see `LayerCost`.

        Args:
          pieces: number and length of pieces of prompts that a decode pass computes, too. The
            square of the length times the number gives the pairs that attention computes.
        """

        def layer_s(degree: Numbers) -> np.ndarray:
            pieces_s = cost.attention_s(LayerPhase.ENCODE, *pieces, degree) if pieces else 0.0
            return (
                cost.attention_s(phase, batch, length, degree)
                + pieces_s
                + cost.rest_s(phase, num_tokens, degree)
                + cost.sync_s(phase, num_tokens, degree)
            )

        in_single, in_sharded, through_s = self._layers_s(num_layers, layer_s)
        if num_head_tokens is not None:
            head_s = cost.head_s(num_head_tokens, np.where(self.num_sharded > 0, self.degree, 1))
            in_sharded = in_sharded + head_s * (self.num_sharded > 0)
            in_single = in_single + head_s * (self.num_sharded == 0)
            through_s = through_s + head_s
        num_near = np.maximum(self.num_stages - 1 - self.num_across, 0)
        through_s = (
            through_s
            + self.num_stages * cost.launch_s
            + num_near * cost.handoff_s(num_tokens, is_across=False)
            + self.num_across * cost.handoff_s(num_tokens, is_across=True)
        )
        return np.maximum(in_single, in_sharded) + cost.launch_s, through_s

    def join_s(
        self, cost: LayerCost, num_layers: int, num_tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds to project encoder outputs in all layers, as `pass_s` does."""
        in_single, in_sharded, through_s = self._layers_s(
            num_layers, lambda degree: cost.join_s(num_tokens, degree)
        )
        return np.maximum(in_single, in_sharded), through_s

    def encode_pass_s(
        self,
        deployment: Deployment,
        batch: np.ndarray,
        length: Numbers,
        num_tokens: np.ndarray,
        *,
        joins: bool = True,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return `pass_s` of prompts; `joins` adds the projection of encoder outputs.

        Args:
          length: of the prompts; its square gives the pairs that attention computes.
        """
        model, cost = deployment.model, deployment.cost
        slowest_s, through_s = self.pass_s(
            cost,
            LayerPhase.ENCODE,
            model.num_encode_layers,
            batch=batch,
            length=length,
            num_tokens=num_tokens,
            num_head_tokens=batch if model.is_decoder_only else None,
        )
        if joins and not model.is_decoder_only:
            joined = self.join_s(cost, model.num_decode_layers, num_tokens)
            slowest_s, through_s = slowest_s + joined[0], through_s + joined[1]
        return slowest_s, through_s

    def decode_pass_s(
        self,
        deployment: Deployment,
        rows: np.ndarray,
        length: Numbers,
        num_joined: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return `pass_s` of a token of each of `rows` sequences of mean length `length`.

        Args:
          num_joined: tokens whose encoder outputs are projected in the same pass.
        """
        model, cost = deployment.model, deployment.cost
        slowest_s, through_s = self.pass_s(
            cost,
            LayerPhase.DECODE,
            model.num_decode_layers,
            batch=rows,
            length=length,
            num_tokens=rows,
            num_head_tokens=rows,
        )
        if num_joined is not None and not model.is_decoder_only:
            joined = self.join_s(cost, model.num_decode_layers, num_joined)
            slowest_s, through_s = slowest_s + joined[0], through_s + joined[1]
        return slowest_s, through_s

    def _layers_s(
        self, num_layers: int, layer_s: Callable[[Numbers], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the seconds in the fullest single and sharded stage, and through all stages."""
        single_s = layer_s(1)
        # Without sharded stages their seconds do not count.
        sharded_s = layer_s(self.degree) if self.num_sharded.any() else single_s
        most_single, most_sharded = self.most_layers(num_layers)
        all_s = self.num_single * single_s + self.num_sharded * self.degree * sharded_s
        return (
            most_single * single_s,
            most_sharded * sharded_s,
            num_layers / self.num_devices * all_s,
        )

    def memory_bytes(
        self,
        model: TransformerShape,
        *,
        num_encode_layers: int,
        num_decode_layers: int,
        kv_tokens: Numbers,
    ) -> np.ndarray:
        """Return the bytes of weights and KV on the fullest device.

        `Cluster.memory_share` leaves room for activations, which are small. Pass 0 encode layers if
        these are the decode layers.
        """

        def most(num_layers: int) -> np.ndarray:
            single, sharded = self.most_layers(num_layers)
            return np.maximum(single, sharded / self.degree)

        decode_bytes = model.decode_layer_bytes + np.multiply(kv_tokens, model.kv_bytes_per_token)
        embedding = model.num_embedding_params * model.bytes_each
        return (
            most(num_encode_layers) * model.encode_layer_bytes
            + most(num_decode_layers) * decode_bytes
            + embedding / np.where(self.num_single > 0, 1, self.degree)
        )

    def whole_bytes(
        self, model: TransformerShape, kv_tokens: Numbers, *, holds_encoder: bool = True
    ) -> np.ndarray:
        """Return `memory_bytes` of stages that decode, and hold the encoder too if there is one."""
        has_encoder = holds_encoder and not model.is_decoder_only
        return self.memory_bytes(
            model,
            num_encode_layers=model.num_encode_layers if has_encoder else 0,
            num_decode_layers=model.num_decode_layers,
            kv_tokens=kv_tokens,
        )


def shared_out(num_layers: int, devices: list[int]) -> list[int]:
    """Return the layers of each stage, in proportion to its devices and rounded."""
    ends = np.cumsum([0, *devices]) * num_layers
    return np.diff(-(-ends // sum(devices))).tolist()


# Shares by which an answer may exceed the average: the scheduler keeps encode phases within a tenth
# of their mean (`Workload.threshold`), and decode iterations of RRA are within 2.4 % (table 7).
_ENCODE_MARGIN, _DECODE_MARGIN = 0.1, 0.024


def roofline_deployment(model: TransformerShape, cluster: Cluster) -> Deployment:
    """Return a model on a simulated cluster, with the margins in latency that a runner needs."""
    return Deployment(
        model=model,
        cluster=cluster,
        cost=RooflineLayerCost(model, cluster),
        encode_margin=_ENCODE_MARGIN,
        decode_margin=_DECODE_MARGIN,
    )


@final
@dataclass(frozen=True)
class RooflineLayerCost(LayerCost):
    """Layer costs as the longer of arithmetic and memory traffic.

    Products with weights take two operations per token and parameter, and read the weights once.
    Attention takes four operations per channel for each pair of a token and a position; decoding
    reads the KV of every position. Sums over shards are ring sums.
    """

    model: TransformerShape
    cluster: Cluster

    batching_pays = True

    @property
    def launch_s(self) -> float:
        return self.cluster.launch_s

    def attention_s(
        self, phase: LayerPhase, batch: Numbers, length: Numbers, degree: Numbers
    ) -> np.ndarray:
        if phase is LayerPhase.ENCODE:
            pairs = batch * np.square(length)
            width = self.model.encode_layer.attention_width
            return 4.0 * width * pairs / (self._flops * degree)
        pairs = np.multiply(batch, length)
        compute_s = 4.0 * self.model.decode_layer.attention_width * pairs / self._flops
        read_s = self.model.kv_bytes_per_token * pairs / self._memory_bytes_per_s
        return np.maximum(compute_s, read_s) / degree

    def rest_s(self, phase: LayerPhase, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        return self._product_s(self._layer(phase).num_params, num_tokens, degree)

    def sync_s(self, phase: LayerPhase, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        layer, cluster = self._layer(phase), self.cluster
        sent = 2.0 * np.multiply(num_tokens, layer.hidden_size * self.model.bytes_each)
        ring_s = (
            (1.0 - 1.0 / np.asarray(degree)) * sent / self._reached(cluster.roofs.peer_bytes_per_s)
        )
        return layer.num_syncs * (ring_s + cluster.sync_latency_s * np.greater(degree, 1))

    def join_s(self, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        # The read of these weights is hidden behind the arithmetic of other rows.
        params = self.model.decode_layer.num_join_params
        return np.asarray(2.0 * params * num_tokens / (self._flops * degree))

    def head_s(self, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        return self._product_s(self.model.num_embedding_params, num_tokens, degree)

    def handoff_s(self, num_tokens: Numbers, *, is_across: bool) -> np.ndarray:
        cluster, model = self.cluster, self.model
        link = cluster.network_bytes_per_s if is_across else cluster.roofs.peer_bytes_per_s
        sent = np.multiply(num_tokens, model.decode_layer.hidden_size * model.bytes_each)
        return sent / self._reached(link) + cluster.handoff_latency_s

    def handover_s(self, num_tokens: Numbers, num_devices: Numbers) -> np.ndarray:
        # Through host memory (section 3): out of one device and into another at the same time.
        model = self.model
        token_bytes = model.num_decode_layers * model.kv_bytes_per_token
        if not model.is_decoder_only:
            token_bytes = model.encode_layer.hidden_size * model.bytes_each
        link = self._reached(self.cluster.roofs.link_bytes_per_s)
        return np.multiply(num_tokens, token_bytes) / (link * np.asarray(num_devices))

    def _product_s(self, num_params: float, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        compute_s = 2.0 * num_params * np.asarray(num_tokens) / self._flops
        read_s = num_params * self.model.bytes_each / self._memory_bytes_per_s
        return np.maximum(compute_s, read_s) / degree

    def _layer(self, phase: LayerPhase) -> LayerShape:
        return self.model.encode_layer if phase is LayerPhase.ENCODE else self.model.decode_layer

    @property
    def _flops(self) -> float:
        return self.cluster.roofs.flops * self.cluster.compute_efficiency

    @property
    def _memory_bytes_per_s(self) -> float:
        return self.cluster.roofs.memory_bytes_per_s * self.cluster.memory_efficiency

    def _reached(self, bytes_per_s: float) -> float:
        return bytes_per_s * self.cluster.peer_efficiency


def stages_of(model: TransformerShape, devices: list[int]) -> tuple[PipelineStage, ...]:
    """Return stages that each hold their share of the encode and of the decode layers."""
    return tuple(
        PipelineStage(num_devices=num, num_encode_layers=encode, num_decode_layers=decode)
        for num, encode, decode in zip(
            devices,
            shared_out(model.num_encode_layers, devices),
            shared_out(model.num_decode_layers, devices),
            strict=True,
        )
    )
