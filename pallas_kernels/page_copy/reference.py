"""The reference of page copies, page by page; it cannot be traced."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped


def gather_pages(
    pages: Shaped[Array, "layers pages *page"], source: Int[Array, " count"]
) -> Shaped[Array, "layers count *page"]:
    out = np.zeros((pages.shape[0], source.shape[0], *pages.shape[2:]), pages.dtype)
    for i, page in enumerate(np.asarray(source)):
        out[:, i] = pages[:, page]
    return jnp.asarray(out)


def scatter_pages(
    pages: Shaped[Array, "layers pages *page"],
    target: Int[Array, " count"],
    values: Shaped[Array, "layers count *page"],
) -> Shaped[Array, "layers pages *page"]:
    out = np.array(pages)
    for i, page in enumerate(np.asarray(target)):
        if page < pages.shape[1]:
            out[:, page] = values[:, i]
    return jnp.asarray(out)


def move_pages(
    pages: Shaped[Array, "layers pages *page"],
    source: Int[Array, " count"],
    target: Int[Array, " count"],
) -> Shaped[Array, "layers pages *page"]:
    return scatter_pages(pages, target, gather_pages(pages, source))
