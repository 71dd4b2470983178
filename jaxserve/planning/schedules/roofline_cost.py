"""Layer costs from the rooflines and links of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.planning.schedules.clusters import Cluster
from jaxserve.planning.schedules.models import LayerShape, TransformerShape
from jaxserve.planning.schedules.timeline import Deployment, Numbers, Phase

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
class RooflineLayerCost:
    """Layer costs as the longer of arithmetic and memory traffic.

    Products with weights take two operations per token and parameter, and read the weights once.
    Attention takes four operations per channel for each pair of a token and a position; decoding
    reads the KV of every position. Sums over shards are ring sums.
    """

    model: TransformerShape
    cluster: Cluster

    @property
    def batching_pays(self) -> bool:
        return True

    @property
    def launch_s(self) -> float:
        return self.cluster.launch_s

    def attention_s(
        self, phase: Phase, batch: Numbers, length: Numbers, degree: Numbers
    ) -> np.ndarray:
        if phase is Phase.ENCODE:
            pairs = batch * np.square(length)
            width = self.model.encode_layer.attention_width
            return 4.0 * width * pairs / (self._flops * degree)
        pairs = np.multiply(batch, length)
        compute_s = 4.0 * self.model.decode_layer.attention_width * pairs / self._flops
        read_s = self.model.kv_bytes_per_token * pairs / self._memory_bytes_per_s
        return np.maximum(compute_s, read_s) / degree

    def rest_s(self, phase: Phase, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        return self._product_s(self._layer(phase).num_params, num_tokens, degree)

    def sync_s(self, phase: Phase, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
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

    def _layer(self, phase: Phase) -> LayerShape:
        return self.model.encode_layer if phase is Phase.ENCODE else self.model.decode_layer

    @property
    def _flops(self) -> float:
        return self.cluster.roofs.flops * self.cluster.compute_efficiency

    @property
    def _memory_bytes_per_s(self) -> float:
        return self.cluster.roofs.memory_bytes_per_s * self.cluster.memory_efficiency

    def _reached(self, bytes_per_s: float) -> float:
        return bytes_per_s * self.cluster.peer_efficiency
