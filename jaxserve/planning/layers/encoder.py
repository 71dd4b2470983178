"""One layer of an encoder on the devices of a tensor-parallel degree, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.models.encoder import Encoder, EncoderBatch, EncoderContext
from jaxserve.models.relative_positions import both_ways_biases
from jaxserve.planning.layers.block import TimedBlock
from jaxserve.planning.layers.timing import seconds_of
from jaxserve.steps.placement import Placement


@final
class EncoderLayer:
    """The first layer of an encoder with random weights.

    Args:
      encoder: on the devices of `place`.
    """

    def __init__(self, encoder: Encoder, place: Placement):
        self._config = encoder.config
        self._place = place
        assert isinstance(encoder.blocks, nnx.List), "layers that are not stacked"
        self._block = TimedBlock(encoder.blocks[0], encoder.config.group, place)
        with place.in_force():
            biases = both_ways_biases(encoder.relative_bias[...], encoder.max_distance)

        def attend(
            qkv: Float[Array, "tokens heads 3 head_dim"], batch: EncoderBatch, biases: Array
        ) -> Float[Array, "tokens heads 3 head_dim"]:
            out = EncoderContext(batch, biases).attend(
                qkv,
                scale=encoder.config.attention_scale,
                soft_cap=encoder.config.attention_soft_cap,
            )
            return qkv + jnp.asarray(1e-6, qkv.dtype) * out[:, :, None]

        self._biases = jax.device_put(biases, place.whole)
        self._attend = jax.jit(attend)

    def rest_s(self, x: Float[Array, "tokens embed"]) -> float:
        """See `TimedBlock`."""
        return self._block.rest_s(x)

    def busy_s(self, x: Float[Array, "tokens embed"], devices: Sequence[Any]) -> float:
        """See `TimedBlock`."""
        return self._block.busy_s(x, devices)

    def attention_s(self, num_prompts: int, qkv: Float[Array, "tokens heads 3 head_dim"]) -> float:
        """Return the seconds of the attention of a pass of prompts of equal length.

        Args:
          qkv: of all prompts, with heads divided over the devices.
        """
        length = len(qkv) // num_prompts
        prompt = np.repeat(np.arange(num_prompts, dtype=np.int32), length)
        positions = np.tile(np.arange(length, dtype=np.int32), num_prompts)
        batch = EncoderBatch(np.zeros_like(prompt), prompt, positions)  # pyrefly: ignore[bad-argument-type]
        batch = jax.device_put(batch, self._place.whole)
        with self._place.in_force():
            return seconds_of(lambda qkv: self._attend(qkv, batch, self._biases), qkv)[0]
