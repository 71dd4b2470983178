"""Writing into pages, token by token: what `api.kv_write` must agree with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def kv_write(
    pages: jax.Array, layer: int | jax.Array, values: jax.Array, page: jax.Array, offset: jax.Array
) -> jax.Array:
    """See `api.kv_write`. Of several tokens at one place the last stays; cannot be traced."""
    out = np.array(pages)
    for token in range(values.shape[0]):
        for head in range(values.shape[1]):
            out[int(layer), int(page[token]), head, int(offset[token])] = values[token, head]
    return jnp.asarray(out)
