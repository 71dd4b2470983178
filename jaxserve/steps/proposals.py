"""Proposals for the next tokens of a slot, from its own tokens (prompt lookup decoding)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

# Number of newest tokens that have to recur, at least and at most.
_SHORTEST, _LONGEST = 2, 4


def look_up(
    tokens: Int32[Array, "rows max_context"], length: Int32[Array, " rows"], num: int
) -> tuple[Int32[Array, "rows num"], Bool[Array, " rows"]]:
    """Return what followed the newest tokens of each row where they stood before.

    The longest match of at most four tokens counts, and of equally long ones the latest. Where
    fewer than `num` tokens follow it, they repeat. A match has at least two tokens.

    Args:
      length: number of a row's valid tokens.

    Returns:
      The proposals, and whether a row has any.
    """
    place = jnp.arange(tokens.shape[1])
    last = length[:, None] - 1
    goes_on = place < last  # the newest token is no match of itself
    matched = jnp.zeros(tokens.shape, jnp.int32)
    for back in range(_LONGEST):
        newest = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0), axis=1)
        # What is rolled in from the end stands before the first token, and matches nothing.
        before = jnp.roll(tokens, back, axis=1)
        goes_on &= (before == newest) & (place >= back) & (last >= back)
        matched += goes_on.astype(jnp.int32)
    rank = jnp.where(matched >= _SHORTEST, matched * tokens.shape[1] + place, -1)
    best = jnp.argmax(rank, axis=1)
    start = best[:, None] + 1
    offset = jnp.arange(num) % jnp.maximum(length[:, None] - start, 1)
    found = jnp.take_along_axis(rank, best[:, None], axis=1)[:, 0] >= 0
    return jnp.take_along_axis(tokens, start + offset, axis=1, mode="clip"), found
