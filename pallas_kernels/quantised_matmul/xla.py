"""The product with a packed weight in plain XLA, for every platform and sharding; the reference.

It widens one tile of the weight at a time, so that it makes no copy of the whole weight.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt8

from jaxserve.kernels import dispatch
from jaxserve.kernels.quantised_matmul.packing import (
    PANEL,
    PackedMatrix,
    Rounding,
    dequantise,
    rounded_activations,
)

# Elements of a weight that are widened at a time.
_TILE_ELEMENTS = 2**22


def quantised_matmul(
    x: Float[Array, "tokens in"],
    codes: UInt8[Array, ...],  # the weight's, for the log
    weight: PackedMatrix,
    *,
    rounds_activations: Rounding | None,
    out_dtype: jax.typing.DTypeLike,
) -> Float[Array, "tokens out"]:
    """Implement `api.quantised_matmul`, with the columns of all leading axes in one axis."""
    del codes
    dtype = x.dtype
    if rounds_activations is not None:
        group = weight.group if rounds_activations == "groups" else x.shape[1]
        x, dtype = rounded_activations(x, group), jnp.float32
    x = jnp.pad(x, [(0, 0), (0, weight.depth - x.shape[1])])

    def times(part: PackedMatrix) -> Float32[Array, "tokens columns"]:
        wide = dequantise(part).astype(dtype).reshape(-1, weight.depth)
        return lax.dot_general(
            x, wide, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )

    # Where XLA partitions the product, each shard widens its own part; a slice would gather it.
    if dispatch.is_partitioned():
        return times(weight).astype(out_dtype)
    flat = jax.tree.map(
        lambda leaf: leaf.reshape(-1, *leaf.shape[weight.channels.ndim - 1 :]), weight
    )
    panels = flat.channels.shape[0]
    tile = max(1, _TILE_ELEMENTS // (PANEL * weight.depth))
    if panels <= tile:
        return times(flat).astype(out_dtype)

    def one(
        number: Int32[Array, ""], out: Float32[Array, "tokens out"]
    ) -> Float32[Array, "tokens out"]:
        start = jnp.minimum(number * tile, panels - tile)
        part = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, tile, 0), flat)
        return lax.dynamic_update_slice_in_dim(out, times(part), start * PANEL, 1)

    nothing = jnp.zeros((x.shape[0], panels * PANEL), jnp.float32)
    return lax.fori_loop(0, -(-panels // tile), one, nothing).astype(out_dtype)
