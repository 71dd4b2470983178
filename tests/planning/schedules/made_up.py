"""Made-up costs, models and clusters, small enough to work out by hand or to enumerate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.planning.schedules import Deployment, LengthDistribution, TaskLengths
from jaxserve.planning.schedules.cluster import Cluster, DeviceRoofs, LayerShape, TransformerShape
from jaxserve.planning.schedules.layer_cost import LayerPhase, Numbers, Timeline
from jaxserve.planning.schedules.schedule import Points
from jaxserve.planning.schedules.search import Incumbent, Score


@dataclass(frozen=True)
class MadeUpCost:
    """Straight lines, shared by shards, and optionally rounded up to steps of a batch.

    Attributes:
      token_s: a layer's seconds per token to encode.
      row_s, read_s: a layer's seconds per decoded token, and of every pass.
      position_s: a layer's seconds of attention per pair of a token and a position.
      step: numbers of tokens are rounded up to multiples of this; 0 for none.
    """

    token_s: float = 0.5
    row_s: float = 0.25
    read_s: float = 1.0
    position_s: float = 0.0
    sum_s: float = 0.0
    join_token_s: float = 0.0
    head_token_s: float = 0.0
    hop_s: float = 0.0
    far_hop_s: float = 0.0
    kv_token_s: float = 0.0
    launch_s: float = 0.0
    step: int = 0

    @property
    def batching_pays(self) -> bool:
        return not self.step

    def attention_s(
        self, phase: LayerPhase, batch: Numbers, length: Numbers, degree: Numbers
    ) -> np.ndarray:
        pairs = np.multiply(batch, np.square(length) if phase is LayerPhase.ENCODE else length)
        return np.asarray(self.position_s * pairs / degree)

    def rest_s(self, phase: LayerPhase, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        num = self._rounded(num_tokens)
        if phase is LayerPhase.ENCODE:
            return self.token_s * num / degree
        return (self.read_s + self.row_s * num) / degree

    def sync_s(self, phase: LayerPhase, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        return self.sum_s * np.greater(degree, 1) + 0.0 * np.asarray(num_tokens)

    def join_s(self, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        return np.asarray(self.join_token_s * np.asarray(num_tokens) / degree)

    def head_s(self, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        return np.asarray(self.head_token_s * np.asarray(num_tokens) / degree)

    def handoff_s(self, num_tokens: Numbers, *, is_across: bool) -> np.ndarray:
        hop_s = self.far_hop_s if is_across else self.hop_s
        return hop_s + 0.0 * np.asarray(num_tokens)

    def handover_s(self, num_tokens: Numbers, num_devices: Numbers) -> np.ndarray:
        return np.asarray(self.kv_token_s * np.asarray(num_tokens) / num_devices)

    def _rounded(self, num_tokens: Numbers) -> np.ndarray:
        num = np.asarray(num_tokens, np.float64)
        return np.ceil(num / self.step - 1e-9) * self.step if self.step else num


def model_of(num_layers: int, *, is_decoder_only: bool = True) -> TransformerShape:
    """A layer of 20 bytes, 12 bytes of KV a token and layer, and 8 bytes of embedding."""
    layer = LayerShape(hidden_size=3, attention_width=3, kv_width=3, num_params=10)
    return TransformerShape(
        encode_layer=layer,
        num_encode_layers=num_layers,
        decode_layer=layer,
        num_decode_layers=num_layers,
        num_embedding_params=4,
        is_decoder_only=is_decoder_only,
    )


def cluster_of(num_devices: int, *, memory_bytes: float = 1e9, per_machine: int = 8) -> Cluster:
    roofs = DeviceRoofs(
        flops=1000.0,
        memory_bytes_per_s=100.0,
        link_bytes_per_s=10.0,
        memory_bytes=memory_bytes,
        peer_bytes_per_s=50.0,
    )
    return Cluster(
        roofs=roofs,
        num_devices=num_devices,
        devices_per_machine=per_machine,
        network_bytes_per_s=5.0,
        compute_efficiency=0.5,
        memory_efficiency=0.5,
        peer_efficiency=0.5,
        sync_latency_s=0.25,
        handoff_latency_s=0.125,
        launch_s=0.0,
        memory_share=1.0,
    )


def always(length: int) -> LengthDistribution:
    return LengthDistribution.of_samples([length])


def random_case(rng: np.random.Generator) -> tuple[Deployment, TaskLengths]:
    """A deployment whose configurations can be enumerated, often with jagged costs."""
    num_layers = int(rng.integers(2, 9))
    num_devices = int(rng.integers(1, 9))
    cost = MadeUpCost(
        token_s=rng.uniform(0.01, 1.0),
        row_s=rng.uniform(0.0, 0.5),
        read_s=rng.uniform(0.0, 3.0),
        position_s=rng.choice([0.0, 0.02]),
        sum_s=rng.choice([0.0, 0.1, 1.0]),
        join_token_s=rng.uniform(0.0, 0.1),
        head_token_s=rng.uniform(0.0, 0.3),
        hop_s=rng.uniform(0.0, 0.3),
        far_hop_s=rng.uniform(0.3, 1.0),
        kv_token_s=rng.uniform(0.0, 0.3),
        launch_s=rng.uniform(0.0, 0.2),
        step=int(rng.choice([0, 0, 4, 8])),
    )
    deployment = Deployment(
        model=model_of(num_layers, is_decoder_only=bool(rng.random() < 0.7)),
        cluster=cluster_of(
            num_devices, memory_bytes=rng.choice([400.0, 2000.0, 1e9]), per_machine=4
        ),
        cost=cost,
        max_encode_batch=int(rng.integers(1, 16)),
        max_sequences=float(rng.choice([20.0, np.inf])),
        encode_margin=rng.choice([0.0, 0.1]),
        decode_margin=rng.choice([0.0, 0.05]),
    )
    lengths = TaskLengths(
        LengthDistribution.of_samples(rng.integers(1, 9, 5).tolist()),
        LengthDistribution.of_samples(rng.integers(1, 25, 6).tolist()),
    )
    return deployment, lengths


def enumerate_all(
    timelines: Sequence[Timeline], score: Score, *, at_a_time: int = 1 << 15
) -> Incumbent:
    """Return the configuration with the highest score, by computing every one."""
    best = Incumbent()
    for timeline in timelines:
        shape = len(timeline.layouts), timeline.max_encode_batch, timeline.max_control
        total = int(np.prod(shape))
        for begin in range(0, total, at_a_time):
            index = np.arange(begin, min(begin + at_a_time, total))
            layout, batch, control = np.unravel_index(index, shape)
            points = Points(layout, batch + 1, control + 1)
            best = best.improved(timeline, points, score)
    return best
