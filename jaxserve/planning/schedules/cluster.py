"""Models and clusters by their sizes: those of ExeGPT's tables 1 and 2, and newer clusters."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, final

from jaxserve.core.errors import InvalidConfigError


@final
@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The sizes of an encoder or decoder layer.

    Attributes:
      hidden_size: width of the activations between layers.
      attention_width: width of all query heads together.
      kv_width: width of all key heads together, and of all value heads.
      num_params: parameters that every token is multiplied with.
      num_join_params: parameters of the key and value projections of encoder outputs (cross
        attention), with which each input token is multiplied once.
      num_syncs: sums over tensor-parallel shards (section 2: two for an encoder layer, three for a
        decoder layer with cross attention).
    """

    hidden_size: int
    attention_width: int
    kv_width: int
    num_params: float
    num_join_params: float = 0.0
    num_syncs: int = 2


@final
@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """The sizes of a model that encodes inputs and decodes outputs.

    In a decoder-only model `encode_layer` equals `decode_layer`. Its encoding fills the KV cache
    and yields the first output token.

    Attributes:
      num_embedding_params: parameters of the vocabulary's embedding, and of the output head.
      bytes_each: bytes of a parameter, and of an element of the KV cache.
    """

    encode_layer: LayerShape
    num_encode_layers: int
    decode_layer: LayerShape
    num_decode_layers: int
    num_embedding_params: float
    bytes_each: int = 2
    is_decoder_only: bool = True

    @classmethod
    def decoder_only(
        cls,
        *,
        num_layers: int,
        hidden_size: int,
        vocab_size: int,
        ffn_size: int | None = None,
        group_size: int = 1,
        num_ffn_matrices: int = 2,
        bytes_each: int = 2,
    ) -> TransformerShape:
        """Return a decoder whose query heads have the total width `hidden_size`.

        Args:
          ffn_size: width of the feed-forward layer; four times `hidden_size` by default.
          group_size: query heads per KV head.
          num_ffn_matrices: 3 for gated feed-forward layers.
        """
        kv_width = hidden_size // group_size
        attention = 2 * hidden_size * (hidden_size + kv_width)
        ffn = num_ffn_matrices * hidden_size * (ffn_size or 4 * hidden_size)
        layer = LayerShape(
            hidden_size=hidden_size,
            attention_width=hidden_size,
            kv_width=kv_width,
            num_params=attention + ffn,
        )
        return cls(
            encode_layer=layer,
            num_encode_layers=num_layers,
            decode_layer=layer,
            num_decode_layers=num_layers,
            num_embedding_params=vocab_size * hidden_size,
            bytes_each=bytes_each,
        )

    @classmethod
    def encoder_decoder(
        cls,
        *,
        num_layers: int,
        hidden_size: int,
        attention_width: int,
        ffn_size: int,
        vocab_size: int,
        num_ffn_matrices: int = 2,
        bytes_each: int = 2,
    ) -> TransformerShape:
        """Return a model like T5, with `num_layers` encoder and as many decoder layers."""
        attention = 4 * hidden_size * attention_width
        ffn = num_ffn_matrices * hidden_size * ffn_size
        widths = {
            "hidden_size": hidden_size,
            "attention_width": attention_width,
            "kv_width": attention_width,
        }
        join = 2 * hidden_size * attention_width
        return cls(
            encode_layer=LayerShape(**widths, num_params=attention + ffn),
            num_encode_layers=num_layers,
            # Of decoded tokens, cross attention projects only queries and outputs.
            decode_layer=LayerShape(
                **widths, num_params=2 * attention - join + ffn, num_join_params=join, num_syncs=3
            ),
            num_decode_layers=num_layers,
            num_embedding_params=vocab_size * hidden_size,
            bytes_each=bytes_each,
            is_decoder_only=False,
        )

    @property
    def encode_layer_bytes(self) -> float:
        return self.encode_layer.num_params * self.bytes_each

    @property
    def decode_layer_bytes(self) -> float:
        layer = self.decode_layer
        return (layer.num_params + layer.num_join_params) * self.bytes_each

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of a token's keys and values in one decode layer."""
        return 2.0 * self.decode_layer.kv_width * self.bytes_each

    @property
    def num_params(self) -> float:
        """All parameters, with the embedding counted once."""
        layers = self.num_decode_layers * self.decode_layer_bytes
        if not self.is_decoder_only:
            layers += self.num_encode_layers * self.encode_layer_bytes
        return layers / self.bytes_each + self.num_embedding_params


def _gpt3(num_layers: int, hidden_size: int) -> TransformerShape:
    return TransformerShape.decoder_only(
        num_layers=num_layers, hidden_size=hidden_size, vocab_size=51200
    )


# Table 1, and Llama 3 8B by its published configuration. T5's other widths are those of its 11B
# checkpoint: 128 heads of 128, and a feed-forward width of 65,536; its 48 layers are 24 encoder and
# 24 decoder layers.
MODELS = {
    "T5-11B": TransformerShape.encoder_decoder(
        num_layers=24, hidden_size=1024, attention_width=16384, ffn_size=65536, vocab_size=32128
    ),
    "OPT-13B": TransformerShape.decoder_only(num_layers=40, hidden_size=5120, vocab_size=50272),
    "GPT3-39B": _gpt3(48, 8192),
    "GPT3-101B": _gpt3(80, 10240),
    "GPT3-175B": _gpt3(96, 12288),
    "GPT3-341B": _gpt3(120, 15360),
    "Llama-3-8B": TransformerShape.decoder_only(
        num_layers=32,
        hidden_size=4096,
        vocab_size=128256,
        ffn_size=14336,
        group_size=4,
        num_ffn_matrices=3,
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class DeviceRoofs:
    """The limits of a device.

    Attributes:
      flops: operations per second, in the model's precision.
      link_bytes_per_s: bandwidth between device and host, in each direction.
      peer_bytes_per_s: bandwidth between neighbouring devices of a machine.
    """

    flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    memory_bytes: float
    peer_bytes_per_s: float = math.inf


@final
@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal devices in equal machines, and the shares of their limits that programs reach.

    Attributes:
      network_bytes_per_s: bandwidth between devices of different machines, in one direction.
      compute_efficiency, memory_efficiency, peer_efficiency: reached share of `flops`, of the
        memory bandwidth, and of the bandwidths between devices and to the host.
      sync_latency_s: fixed seconds of a sum over shards.
      handoff_latency_s: fixed seconds of a transfer between stages.
      launch_s: fixed seconds of a pass in a stage.
      memory_share: share of device memory for weights, KV and activations.
      measured_degrees: tensor-parallel degrees whose costs are known; None for all.
    """

    roofs: DeviceRoofs
    num_devices: int
    devices_per_machine: int
    network_bytes_per_s: float
    compute_efficiency: float
    memory_efficiency: float
    peer_efficiency: float
    sync_latency_s: float
    handoff_latency_s: float
    launch_s: float
    memory_share: float = 0.9
    measured_degrees: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if min(self.num_devices, self.devices_per_machine) < 1:
            raise InvalidConfigError(
                f"num_devices={self.num_devices} in machines of {self.devices_per_machine} is not "
                "allowed; pass at least 1 of each"
            )

    @property
    def memory_bytes(self) -> float:
        return self.memory_share * self.roofs.memory_bytes

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees: powers of two that divide a machine's devices and the cluster.

        Shards of a layer share a machine. With measured degrees, it is those that fit in a machine;
        remaining devices are single stages.
        """
        inside = min(self.num_devices, self.devices_per_machine)
        if self.measured_degrees is not None:
            return tuple(degree for degree in self.measured_degrees if degree <= inside)
        return tuple(
            degree
            for degree in (1, 2, 4, 8, 16)
            if inside % degree == 0 and self.num_devices % degree == 0
        )

    def of(self, num_devices: int) -> Cluster:
        """Return the sub-cluster of `num_devices` devices, in as few machines as possible."""
        return replace(self, num_devices=num_devices)


# Compute, memory and PCIe efficiency were fitted to tables 6 and 7 of the paper (OPT 13B on four
# A40; docs/benchmarks/papers.md shows the fit). The same values are used for other devices.
_FITTED: dict[str, Any] = {
    "compute_efficiency": 0.70,
    "memory_efficiency": 0.80,
    "peer_efficiency": 0.65,
    "sync_latency_s": 20e-6,
    "handoff_latency_s": 50e-6,
    "launch_s": 1e-3,
}
# NVLink reaches a larger share of its bandwidth with less latency; neither was measured.
_NVLINK: dict[str, Any] = _FITTED | {"peer_efficiency": 0.75, "sync_latency_s": 10e-6}

# Data sheets: dense 16-bit tensor operations; one direction of each link. Table 2 of the paper for
# the numbers of devices and the networks of A40 and A100.
_H100 = Cluster(
    roofs=DeviceRoofs(
        flops=989.4e12,
        memory_bytes_per_s=3350e9,
        link_bytes_per_s=63e9,
        memory_bytes=80e9,
        peer_bytes_per_s=450e9,
    ),
    num_devices=16,
    devices_per_machine=8,
    network_bytes_per_s=50e9,
    **_NVLINK,
)
CLUSTERS = {
    "A40": Cluster(
        roofs=DeviceRoofs(
            flops=149.7e12,
            memory_bytes_per_s=696e9,
            link_bytes_per_s=31.5e9,
            memory_bytes=48e9,
            peer_bytes_per_s=31.5e9,
        ),
        num_devices=48,
        devices_per_machine=8,
        network_bytes_per_s=12.5e9,
        **_FITTED,
    ),
    "A100": Cluster(
        roofs=DeviceRoofs(
            flops=312e12,
            memory_bytes_per_s=2039e9,
            link_bytes_per_s=31.5e9,
            memory_bytes=80e9,
            peer_bytes_per_s=300e9,
        ),
        num_devices=16,
        devices_per_machine=8,
        network_bytes_per_s=25e9,
        **_NVLINK,
    ),
    "H100": _H100,
    "H200": replace(
        _H100, roofs=replace(_H100.roofs, memory_bytes_per_s=4800e9, memory_bytes=141e9)
    ),
}
