"""A model on measured devices, for the search of schedules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxserve.execution.memory_plan import free_device_bytes
from jaxserve.models.config import DecoderConfig
from jaxserve.models.encoder_decoder import RelativeConfig
from jaxserve.planning.layers.cost import MeasuredLayerCost
from jaxserve.planning.layers.layer import one_layer, quantised_model
from jaxserve.planning.layers.origin import LayerSizes
from jaxserve.planning.layers.profile import LayerProfile
from jaxserve.planning.roofline import DeviceRoofs
from jaxserve.planning.schedules.clusters import Cluster
from jaxserve.planning.schedules.measured_cost import THRESHOLD
from jaxserve.planning.schedules.models import LayerShape, TransformerShape
from jaxserve.planning.schedules.timeline import Deployment

_HOST_SHARE, _SHARE = 0.5, 0.9


def shape_of(config: DecoderConfig, sizes: LayerSizes) -> TransformerShape:
    """Return the sizes of a model, with the parameters of its first layer counted.

    Parameters are counted in elements of the model's dtype, as many as have their bytes.

    Args:
      sizes: with the formats of the KV cache and of the weights.
    """
    params = jax.eval_shape(lambda: quantised_model(one_layer(config), sizes)[1])
    bytes_each = jnp.dtype(config.dtype).itemsize
    block_bytes = _bytes_of(params["blocks"])
    kv_bytes = jnp.dtype(sizes.kv_dtype or config.dtype).itemsize
    layer = LayerShape(
        hidden_size=config.hidden_size,
        attention_width=config.num_heads * config.head_dim,
        # In elements of the model's dtype, which `TransformerShape` takes KV to have.
        kv_width=-(-config.num_kv_heads * config.head_dim * kv_bytes // bytes_each),
        num_params=block_bytes / bytes_each,
    )
    shape = TransformerShape(
        encode_layer=layer,
        num_encode_layers=config.num_layers,
        decode_layer=layer,
        num_decode_layers=config.num_layers,
        num_embedding_params=_bytes_of(params["embedding"]) / bytes_each,
        bytes_each=bytes_each,
    )
    if not config.has_encoder:
        return shape
    # Each encoder output is multiplied with the keys' and values' projections once.
    join = _bytes_of(params["blocks"][0]["cross"]["wkv"]) / bytes_each
    encoder_bytes = _bytes_of(params["encoder"]["blocks"])
    return replace(
        shape,
        encode_layer=replace(layer, num_params=encoder_bytes / bytes_each),
        num_encode_layers=cast(RelativeConfig, config).encoder.num_layers,
        decode_layer=replace(
            layer, num_params=layer.num_params - join, num_join_params=join, num_syncs=3
        ),
        is_decoder_only=False,
    )


def _bytes_of(params: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def free_bytes_of(devices: Sequence[Any]) -> float:
    """Return the memory of each device that weights and KV may take.

    Host devices share half of the free memory. Others have most of their own.
    """
    free = free_device_bytes(devices[0])
    return _HOST_SHARE * free / len(devices) if devices[0].platform == "cpu" else _SHARE * free


def layers_deployment(
    profile: LayerProfile,
    config: DecoderConfig,
    num_devices: int,
    memory_bytes: float,
    *,
    num_input_tokens: float = 0.0,
) -> Deployment:
    """Return a model on the measured devices, as one machine.

    All sequences together are at most as many as the largest measured batch, as an engine's slots
    are. Batches may exceed their mean by `THRESHOLD`, and phases last longer by as much.

    Args:
      num_devices: the first of the devices that were measured.
      memory_bytes: memory of each of them for weights and KV.
      num_input_tokens: see `MeasuredLayerCost`.

    Raises:
      InvalidProfileError: see `MeasuredLayerCost`.
      InvalidConfigError: `num_devices` is below 1.
    """
    cost = MeasuredLayerCost(
        profile, config.num_layers, num_devices, num_input_tokens=num_input_tokens
    )
    cluster = Cluster(
        roofs=DeviceRoofs(
            flops=math.inf,
            memory_bytes_per_s=math.inf,
            link_bytes_per_s=math.inf,
            memory_bytes=memory_bytes,
        ),
        num_devices=num_devices,
        devices_per_machine=max(1, num_devices),
        network_bytes_per_s=math.inf,
        compute_efficiency=1.0,
        memory_efficiency=1.0,
        peer_efficiency=1.0,
        sync_latency_s=0.0,
        handoff_latency_s=0.0,
        launch_s=cost.launch_s,
        memory_share=1.0,
        measured_degrees=cost.degrees,
    )
    max_sequences = profile.sizes.max_batch
    return Deployment(
        model=shape_of(config, profile.sizes),
        cluster=cluster,
        cost=cost,
        max_encode_batch=max_sequences,
        max_sequences=max(1.0 + 1e-9, max_sequences / (1 + THRESHOLD)),
        encode_margin=THRESHOLD,
        decode_margin=THRESHOLD,
    )
