"""The public signature of writing into pages, served by XLA on every platform."""

from __future__ import annotations

import jax


def kv_write(
    pages: jax.Array, layer: int | jax.Array, values: jax.Array, page: jax.Array, offset: jax.Array
) -> jax.Array:
    """Write one step's keys (or values) into the paged cache, in place when `pages` is donated.

    Args:
      pages: [layers, pages, kv_heads, page_size, head_dim].
      layer: which layer.
      values: [tokens, kv_heads, head_dim].
      page, offset: int32 [tokens], where each token goes: places inside the cache, each at most
        once but those of page 0, the null page (padding), whose content is undefined.

    Returns:
      `pages` with the tokens written.
    """
    return pages.at[layer, page, :, offset, :].set(values.astype(pages.dtype))
