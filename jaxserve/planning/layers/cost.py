"""Layer costs from measured layers, and a deployment that uses them, for `schedules.search`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.errors import InvalidProfileError
from jaxserve.execution.memory_plan import free_device_bytes
from jaxserve.models.config import DecoderConfig
from jaxserve.models.encoder_decoder import RelativeConfig
from jaxserve.planning.layers import profile as parts
from jaxserve.planning.layers.bench import one_layer, quantised_model
from jaxserve.planning.layers.profile import LayerProfile, LayerSizes, batch_curve, curve
from jaxserve.planning.schedules.cluster import Cluster, DeviceRoofs, LayerShape, TransformerShape
from jaxserve.planning.schedules.layer_cost import Deployment, LayerCost, LayerPhase, Numbers
from jaxserve.planning.schedules.measured_cost import THRESHOLD


@final
class Line:
    """Seconds over a positive number: linear between points, and raised where measured points fall.

    Beyond the last point seconds grow in proportion, or with a power of the ratio.
    """

    def __init__(self, points: Mapping[int, float], *, power: float = 1.0):
        self.at = np.array(sorted(points), np.float64)
        self.seconds = np.maximum.accumulate([points[at] for at in sorted(points)])
        self._power = power

    def __call__(self, at: Numbers) -> np.ndarray:
        beyond = np.maximum(np.asarray(at, np.float64) / self.at[-1], 1.0) ** self._power
        return np.interp(at, self.at, self.seconds) * beyond


@final
class MeasuredLayerCost(LayerCost):
    """A `LayerCost` of a model on real devices, from a `LayerProfile`.

    Every curve includes the seconds of an empty pass, which are subtracted and counted once a stage
    (`launch_s`). A pass of more tokens or sequences than were measured counts as several passes.
    Prompts beyond the longest length cost with its square.

    The rest of a layer is measured with its sums over shards. These are subtracted, so that the
    total of both is the measured value and rises with the number of tokens.

    For an encoder-decoder model, prompts cost the encoder's layers, and a decoded token attends to
    its own sequence and, by cross attention, to a prompt of the mean length.

    Parts are measured while other devices idle. Host devices share cores, so a layer takes longer
    when all devices compute. The slowdown is measured for the largest pass and applied to every
    part.

    The embedding, the host's planning and edits of slots are not in the profile and count as 0.

    Args:
      num_layers: layers of the decoder, whose KV is handed over.
      num_devices: devices that compute at the same time.
      num_input_tokens: mean tokens of a prompt, for an encoder-decoder model.

    Raises:
      InvalidProfileError: the profile lacks curves of one device, for example because its
        measurement was interrupted.
    """

    def __init__(
        self,
        profile: LayerProfile,
        num_layers: int,
        num_devices: int = 1,
        *,
        num_input_tokens: float = 0.0,
    ):
        self._profile = profile
        self._num_layers = num_layers
        self._num_devices = num_devices
        self._num_input_tokens = num_input_tokens
        self.degrees = profile.degrees
        if 1 not in self.degrees:
            raise InvalidProfileError(
                "the profile lacks curves of a layer on one device; measure again, which goes on "
                "from what is there"
            )
        # By degree; those that only a model with an encoder has are empty for others.
        self._rest, self._encode = self._lines(parts.REST), self._lines(parts.ENCODE)
        self._joins, self._head = self._lines(parts.JOIN), self._lines(parts.HEAD)
        self._sums = {
            degree: self._line(parts.SUMS, degree) if degree > 1 else Line({1: 0.0})
            for degree in self.degrees
        }
        # Transfers take no time on a single device.
        self._handoff = Line(self._seconds(parts.HANDOFF, 1) or {1: 0.0})
        self._handover = Line(self._seconds(parts.HANDOVER, 1) or {1: 0.0})
        # A layer over the number of devices that compute at the same time.
        self._busy = Line(self._seconds(parts.BUSY, 1) or {1: 1.0}, power=0.0)

    @property
    def launch_s(self) -> float:
        return self._seconds(parts.LAUNCH, 1)[1]

    def attention_s(
        self, phase: LayerPhase, batch: Numbers, length: Numbers, degree: Numbers
    ) -> np.ndarray:
        if phase is LayerPhase.DECODE and self._profile.has_encoder:
            across = np.minimum(length, self._num_input_tokens)
            own = np.subtract(length, across)
            return self._by_degree(
                degree, lambda d: self._decodes[d](batch, own) + self._crosses[d](batch, across)
            )
        if phase is LayerPhase.DECODE:
            return self._by_degree(degree, lambda d: self._decodes[d](batch, length))
        return self._by_degree(degree, lambda d: self._prompts[d](batch, length))

    def rest_s(self, phase: LayerPhase, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        is_encoder = phase is LayerPhase.ENCODE and self._profile.has_encoder
        rest = self._encode if is_encoder else self._rest
        whole_s = self._by_degree(degree, lambda d: rest[d](num_tokens))
        return np.maximum(whole_s - self.sync_s(phase, num_tokens, degree), 0.0)

    def sync_s(self, phase: LayerPhase, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        # One after attention, one after the MLP, and one after cross attention.
        num_sums = 2 + (phase is LayerPhase.DECODE and self._profile.has_encoder)
        return self._by_degree(degree, lambda d: num_sums * self._sums[d](num_tokens))

    def slowdown(self, degree: int) -> float:
        """Return how many times as long `degree` devices take when all devices compute.

        It is limited to 1 up to the time of devices that compute one after another, because of
        noise.
        """
        num = max(degree, self._num_devices)
        return float(np.clip(self._busy(num) / self._busy(degree), 1.0, num / degree))

    def join_s(self, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        if not self._profile.has_encoder:
            return np.zeros(np.broadcast(num_tokens, degree).shape)
        return self._by_degree(degree, lambda d: self._joins[d](num_tokens))

    def head_s(self, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        return self._by_degree(degree, lambda d: self._head[d](num_tokens))

    def handoff_s(self, num_tokens: Numbers, *, is_across: bool) -> np.ndarray:
        """Ignore `is_across`: all measured devices are in one machine."""
        return self._handoff(num_tokens)

    def handover_s(self, num_tokens: Numbers, num_devices: Numbers) -> np.ndarray:
        return self._num_layers * self._handover(num_tokens) / np.asarray(num_devices)

    # ---- curves ----

    def _by_degree(self, degree: Numbers, seconds: Callable[[int], np.ndarray]) -> np.ndarray:
        unknown = np.setdiff1d(degree, self.degrees)
        if len(unknown):
            raise InvalidProfileError(
                f"tensor-parallel degrees {unknown.tolist()} were not measured; measured are "
                f"{list(self.degrees)}"
            )
        found = seconds(1) * self.slowdown(1)
        for one in self.degrees[1:]:
            found = np.where(np.equal(degree, one), seconds(one) * self.slowdown(one), found)
        return found + np.zeros(np.shape(degree))

    def _seconds(self, part: str, degree: int) -> dict[int, float]:
        return self._profile.seconds.get(curve(part, degree), {})

    def _line(self, part: str, degree: int, *, power: float = 1.0) -> Line:
        return Line(self._without_launch(self._seconds(part, degree), degree), power=power)

    def _without_launch(self, points: Mapping[int, float], degree: int) -> dict[int, float]:
        launch_s = self._seconds(parts.LAUNCH, degree)[1]
        return {at: max(0.0, seconds - launch_s) for at, seconds in points.items()}

    def _lines(self, part: str) -> dict[int, Line]:
        return {degree: self._line(part, degree) for degree in self.degrees}

    @cached_property
    def _prompts(self) -> dict[int, Prompts]:
        max_tokens = int(self._profile.origin.sizes["max_tokens"])
        return {
            degree: Prompts(
                alone=self._line(parts.PROMPT, degree, power=2.0),
                full=self._full_pass(degree, max_tokens),
                max_tokens=max_tokens,
            )
            for degree in self.degrees
        }

    def _full_pass(self, degree: int, max_tokens: int) -> Line:
        """Return the seconds of max_tokens / length prompts, from whole numbers of prompts."""
        points = self._without_launch(self._seconds(parts.PROMPTS, degree), degree)
        return Line(
            {at: s * max_tokens / at / max(1, max_tokens // at) for at, s in points.items()}
        )

    @cached_property
    def _decodes(self) -> dict[int, Surface]:
        return self._surfaces(parts.DECODE)

    @cached_property
    def _crosses(self) -> dict[int, Surface]:
        return self._surfaces(parts.CROSS)

    def _surfaces(self, part: str) -> dict[int, Surface]:
        return {
            degree: Surface(
                {
                    batch: self._without_launch(
                        self._profile.seconds[batch_curve(part, batch, degree)], degree
                    )
                    for batch in self._seconds(part, degree)
                }
            )
            for degree in self.degrees
        }


@final
class Prompts:
    """Seconds of attention over prompts: the first prompt, and what each further one adds."""

    def __init__(self, alone: Line, full: Line, max_tokens: int):
        self._alone = alone
        self._half = max_tokens / 2
        # The seconds of a full pass are nearly linear in the length, those of a further prompt
        # are not: compute them at every length of which a pass holds two prompts or more.
        lengths = np.arange(1, max(1, max_tokens // 2) + 1)
        num_further = np.maximum(max_tokens / lengths - 1, 1.0)
        further_s = np.maximum(full(lengths) - alone(lengths), 0.0) / num_further
        self._further = Line(
            dict(zip(lengths.tolist(), further_s.tolist(), strict=True)), power=2.0
        )

    def __call__(self, batch: Numbers, length: Numbers) -> np.ndarray:
        alone_s = self._alone(length)
        # A long prompt takes its own pass.
        long_s = np.where(np.greater(length, self._half), alone_s, 0.0)
        further_s = np.maximum(self._further(length), long_s)
        return alone_s + np.maximum(np.subtract(batch, 1.0), 0.0) * further_s


@final
class Surface:
    """Seconds of a batch -> length table, linear in both between measured points.

    Seconds that fall with either are raised. Beyond the last point they grow in proportion.
    """

    def __init__(self, curves: Mapping[int, Mapping[int, float]]):
        self._batches = np.array(sorted(curves), np.float64)
        self._lengths = np.array(sorted({at for c in curves.values() for at in c}), np.float64)
        rows = [Line(curves[batch])(self._lengths) for batch in sorted(curves)]
        self._seconds = np.maximum.accumulate(np.stack(rows), axis=0)

    def __call__(self, batch: Numbers, length: Numbers) -> np.ndarray:
        batch, length = np.broadcast_arrays(
            np.asarray(batch, np.float64), np.asarray(length, np.float64)
        )
        row, down = _place(self._batches, batch)
        column, right = _place(self._lengths, length)
        next_row = np.minimum(row + 1, len(self._batches) - 1)
        next_column = np.minimum(column + 1, len(self._lengths) - 1)

        def at_row(which: np.ndarray) -> np.ndarray:
            low, high = self._seconds[which, column], self._seconds[which, next_column]
            return low + right * (high - low)

        inside = at_row(row) + down * (at_row(next_row) - at_row(row))
        beyond_batch = np.maximum(batch / self._batches[-1], 1.0)
        return inside * beyond_batch * np.maximum(length / self._lengths[-1], 1.0)


def _place(points: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the point below each number, and the share of the way to the next one."""
    below = np.clip(np.searchsorted(points, at, side="right") - 1, 0, len(points) - 1)
    above = np.minimum(below + 1, len(points) - 1)
    width = np.where(above > below, points[above] - points[below], 1.0)
    return below, np.clip((at - points[below]) / width, 0.0, 1.0)


_HOST_SHARE, _SHARE = 0.5, 0.9


def shape_of(config: DecoderConfig, sizes: LayerSizes) -> TransformerShape:
    """Return the sizes of a model, with the parameters of its first layer counted.

    Their unit is an element of the model's dtype: bytes divided by its size.
    """
    params = jax.eval_shape(lambda: quantised_model(one_layer(config), sizes)[1])
    bytes_each = jnp.dtype(config.dtype).itemsize
    block_bytes = _bytes_of(params["blocks"])
    kv_bytes = jnp.dtype(sizes.kv_dtype or config.dtype).itemsize
    layer = LayerShape(
        hidden_size=config.hidden_size,
        attention_width=config.num_heads * config.head_dim,
        # In elements of the model's dtype, which `TransformerShape` assumes for KV.
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
    # Each encoder output is projected once to keys and values.
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
    """Return each device's memory for weights and KV; host devices share half of what is free."""
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

    All sequences together are at most the largest measured batch, as an engine's slots limit them.
    Batches may exceed their mean by the share `THRESHOLD`, which lengthens phases by that share.

    Args:
      num_devices: how many of the measured devices to use.
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
