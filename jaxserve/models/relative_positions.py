"""T5's relative positions: a bias of attention by the distance between query and key, in buckets.

Section 2.1 of Raffel et al., arXiv:1910.10683. Near distances have a bucket each, farther ones
share buckets that grow with the logarithm of the distance, and all beyond a maximum share the last.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def causal_biases(
    table: Float[Array, "buckets heads"], max_distance: int
) -> Float[Array, "heads distances"]:
    """Return the biases of distances 0, 1, ... `max_distance` back; longer ones have the last."""
    distance = np.arange(max_distance + 1)
    return table[_buckets(distance, table.shape[0], max_distance)].T


def both_ways_biases(
    table: Float[Array, "buckets heads"], max_distance: int
) -> Float[Array, "heads offsets"]:
    """Return the biases of a key's position minus its query's, -`max_distance` to `max_distance`.

    Half of the buckets are for keys after the query.
    """
    offset = np.arange(-max_distance, max_distance + 1)
    half = table.shape[0] // 2
    buckets = _buckets(np.abs(offset), half, max_distance) + half * (offset > 0)
    return table[jnp.asarray(buckets)].T


def _buckets(
    distance: Int[np.ndarray, " distances"], num_buckets: int, max_distance: int
) -> Int[np.ndarray, " distances"]:
    """Return the bucket of each distance, in float32 as PyTorch computes it."""
    exact = num_buckets // 2
    far = np.maximum(distance, 1).astype(np.float32) / np.float32(exact)
    log = np.log(far) / np.float32(math.log(max_distance / exact))
    far = exact + (log * np.float32(num_buckets - exact)).astype(np.int64)
    return np.where(distance < exact, distance, np.minimum(far, num_buckets - 1))
