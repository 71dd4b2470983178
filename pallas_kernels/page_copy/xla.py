"""Page copies as XLA gathers and scatters, for every platform and sharding."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jaxserve.kernels.put_rows import put_rows, serves


def gather_pages(
    pages: Shaped[Array, "layers pages *page"], source: Int[Array, " count"]
) -> Shaped[Array, "layers count *page"]:
    return pages.at[:, source].get(mode="promise_in_bounds")


def scatter_pages(
    pages: Shaped[Array, "layers pages *page"],
    target: Int[Array, " count"],
    values: Shaped[Array, "layers count *page"],
) -> Shaped[Array, "layers pages *page"]:
    if not serves(pages):
        return pages.at[:, target].set(values, mode="drop")
    layer = jnp.arange(pages.shape[0])[:, None] * pages.shape[1]
    place = jnp.where(target < pages.shape[1], layer + target, -1)
    return put_rows(pages, place.reshape(-1), values.reshape(place.size, *pages.shape[2:]))


def move_pages(
    pages: Shaped[Array, "layers pages *page"],
    source: Int[Array, " count"],
    target: Int[Array, " count"],
) -> Shaped[Array, "layers pages *page"]:
    return scatter_pages(pages, target, gather_pages(pages, source))
