"""The timer of a model's layers on devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.models.config import DecoderConfig, check_fits
from jaxserve.planning.layers import profile as parts
from jaxserve.planning.layers.layer import ShardedLayer, one_layer
from jaxserve.planning.layers.origin import LayerSizes
from sharding import make_mesh


def degrees_of(config: DecoderConfig, devices: Sequence[Any]) -> tuple[int, ...]:
    """Return the tensor-parallel degrees that divide a model's layers, up to all devices."""
    found = []
    for degree in range(1, len(devices) + 1):
        try:
            check_fits(make_mesh(tensor=degree, devices=devices), config)
        except InvalidConfigError:
            continue
        found.append(degree)
    return tuple(found)


@final
class LayerBench:
    """A `LayerTimer` of the first layer of a model with full attention, with random weights.

    Of an encoder-decoder model, the first layer of each.

    Args:
      devices: those of the cluster; a degree takes the first of them.
      degrees: to time; by default all that `degrees_of` returns.

    Raises:
      InvalidConfigError: a degree does not divide the layer, or is more than the devices; or the
        model has recurrent layers.
    """

    def __init__(
        self,
        config: DecoderConfig,
        sizes: LayerSizes,
        devices: Sequence[Any],
        degrees: Sequence[int] | None = None,
    ):
        if config.num_recurrent_layers:
            raise InvalidConfigError(
                "layers of a model with recurrent layers are not measured yet; pass a model with "
                "attention in all layers"
            )
        allowed = degrees_of(config, devices)
        if degrees is not None and not set(degrees) <= set(allowed):
            raise InvalidConfigError(
                f"degrees {list(degrees)} are not allowed; this model on {len(devices)} devices "
                f"can have {list(allowed)}"
            )
        self._config = one_layer(config)
        self._devices = devices
        self._layers: dict[int, ShardedLayer] = {}
        self.sizes = sizes
        self.degrees = allowed if degrees is None else tuple(degrees)
        self.num_devices = len(devices)

    def seconds(self, part: str, degree: int, at: int) -> float:
        """See `LayerTimer`."""
        layer = self._layer(degree)
        num_prompts = max(1, self.sizes.max_tokens // at)
        timed = {
            parts.LAUNCH: lambda: layer.launch_s(at),
            parts.REST: lambda: layer.rest_s(at),
            parts.ENCODE: lambda: layer.encode_s(at),
            parts.JOIN: lambda: layer.join_s(at),
            parts.SUMS: lambda: layer.sums_s(at),
            parts.HEAD: lambda: layer.head_s(at),
            parts.PROMPT: lambda: layer.prompts_s(1, at),
            parts.PROMPTS: lambda: layer.prompts_s(num_prompts, at),
            parts.BUSY: lambda: layer.busy_s(self.sizes.max_tokens, self._devices[:at]),
            parts.HANDOFF: lambda: layer.handoff_s(at, self._devices[1]),
            parts.HANDOVER: lambda: layer.handover_s(at, self._devices[1]),
        }
        return timed[part]()

    def batch_s(self, part: str, degree: int, batch: int, length: int) -> float:
        """See `LayerTimer`."""
        layer = self._layer(degree)
        if part == parts.CROSS:
            return layer.cross_s(batch, length)
        return layer.attention_s([1] * batch, [length] * batch)

    def _layer(self, degree: int) -> ShardedLayer:
        if degree not in self._layers:
            self._layers[degree] = ShardedLayer(self._config, self.sizes, self._devices[:degree])
        return self._layers[degree]
