"""Pages that a step brings from the host's memory while it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import jax
from jax import lax
from jaxtyping import Array, Int32

from jaxserve.models.batch import KVCache


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class IncomingPages:
    """Pages whose keys and values a layer gets just before it attends (thesis, section 3.4.3.3).

    Attributes:
      target: where in the cache each goes; past its end to skip.
      values: as the cache, but of `count` pages, in the host's memory.
    """

    target: Int32[Array, " count"]
    values: KVCache

    def fetch(self, layer: int | Int32[Array, ""]) -> KVCache:
        """A layer's part in a buffer of its own, on its way to the device.

        Who computes something else before using it need not wait for it. A traced layer past the
        last one is the last one.
        """
        part = self.values
        if len(part.k_pages) == 1:
            part = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, layer, 1), part)
        else:
            assert isinstance(layer, int), "a traced layer needs one buffer for all layers"
            part = part.buffer(layer)
        return jax.device_put(part, jax.memory.Space.Device)

    def put(self, cache: KVCache, layer: int | Int32[Array, ""], fetched: KVCache) -> KVCache:
        """The cache with what was fetched for a layer."""
        return cache.with_pages(layer, self.target, fetched)
