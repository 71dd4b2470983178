"""Copying pages as XLA gathers and scatters, on every platform and under any sharding."""

from __future__ import annotations

import jax


def gather_pages(pages: jax.Array, source: jax.Array) -> jax.Array:
    """See `api.gather_pages`."""
    return pages.at[:, source].get(mode="promise_in_bounds")


def scatter_pages(pages: jax.Array, target: jax.Array, values: jax.Array) -> jax.Array:
    """See `api.scatter_pages`."""
    return pages.at[:, target].set(values, mode="drop")


def move_pages(pages: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """See `api.move_pages`."""
    return scatter_pages(pages, target, gather_pages(pages, source))
