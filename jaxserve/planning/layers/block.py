"""The block of a layer without its attention, on the devices of a tensor-parallel degree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxserve.planning.layers.timing import seconds_of
from jaxserve.steps.placement import Placement

# Copies of a block's weights, so that caches do not hold what other layers would have displaced.
_WEIGHTS_BYTES = 256 << 20
_MAX_COPIES = 32


@final
class TimedBlock:
    """An encoder's or a decoder's block, in several copies, whose attention costs next to nothing.

    Args:
      block: a `jaxserve.models.layers.Block`, on the devices of `place`.
      group: query heads per KV head.
    """

    def __init__(self, block: nnx.Module, group: int, place: Placement):
        definition, params = nnx.split(block)
        self._place = place
        self._params = _copies_of(params)

        def rest(params: Any, x: Float[Array, "tokens embed"]) -> Float[Array, "tokens embed"]:
            return nnx.merge(definition, params)(x, _WithoutAttention(group))

        self._here = jax.jit(rest, out_shardings=place.whole)
        self._anywhere = jax.jit(rest)

    def rest_s(self, x: Float[Array, "tokens embed"]) -> float:
        """Return the seconds of the block, with its sums over shards."""
        params = cycle(self._params)
        with self._place.in_force():
            return seconds_of(lambda x: self._here(next(params), x), x)[0]

    def busy_s(self, x: Float[Array, "tokens embed"], devices: Sequence[Any]) -> float:
        """Return the seconds of the block on each of these devices, all at the same time."""
        params = [jax.device_put(self._params[0], device) for device in devices]
        start = [jax.device_put(x, device) for device in devices]

        def everywhere(inputs: list[Array]) -> list[Array]:
            return [self._anywhere(own, x) for own, x in zip(params, inputs, strict=True)]

        with self._place.in_force():
            return seconds_of(everywhere, start)[0]


@final
class _WithoutAttention:
    """A `LayerContext` in which a query sees its own key and value alone."""

    adapter: Int32[Array, " tokens"] | None = None

    def __init__(self, group: int):
        self._group = group

    def attend(
        self,
        qkv: Float[Array, "tokens kv_heads columns head_dim"],
        *,
        scale: float | None,
        soft_cap: float | None,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        """See `LayerContext`. Keys and values take part, so that they are computed."""
        group = self._group
        own = qkv[:, :, group] + qkv[:, :, group + 1]
        out = qkv[:, :, :group] + jnp.asarray(1e-6, qkv.dtype) * own[:, :, None]
        return out.reshape(len(qkv), -1, qkv.shape[-1])

    def cross(self) -> Any:
        """See `LayerContext`."""
        return _WithoutCrossAttention()


@final
class _WithoutCrossAttention:
    """A `CrossContext` in which a query sees itself alone."""

    adapter: Int32[Array, " tokens"] | None = None

    def attend(
        self,
        q: Float[Array, "tokens q_heads head_dim"],
        *,
        scale: float | None,
        soft_cap: float | None,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        """See `CrossContext`."""
        return q


def _copies_of(params: Any) -> list[Any]:
    """Return a block's parameters, several times in memory."""
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    num = min(_MAX_COPIES, max(1, -(-_WEIGHTS_BYTES // num_bytes)))
    return [params, *(jax.tree.map(jnp.copy, params) for _ in range(num - 1))]
