"""The public signatures of copying pages, and which implementation serves them.

`pages` is any tree of arrays [layers, pages, ...], such as the keys, the values and the scales of a
cache; the call is for each of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, TypeVar

import jax

from pallas_kernels import dispatch
from pallas_kernels.page_copy import reference, triton, xla

Implementation = Literal["reference", "xla", "triton", "triton_interpreted"]
Pages = TypeVar("Pages")

_PREFERRED = {"cuda": ("triton",)}

IMPLEMENTATIONS = ("reference", "xla", "triton", "triton_interpreted")


def gather_pages(
    pages: Pages, source: jax.Array, *, implementation: Implementation | None = None
) -> Pages:
    """Copies of some pages, one behind the other: what a swap stages, or a cache of another size.

    Args:
      pages: of [layers, pages, ...].
      source: int32 [count], pages inside the cache, in any order and any number of times.
      implementation: overrides the platform's choice: "triton" on NVIDIA GPUs, else "xla".

    Returns:
      Arrays [layers, count, ...]; the i-th is page `source[i]`.

    Raises:
      NotImplementedError: the implementation asked for cannot serve this case; says why.
      ValueError: the shapes contradict each other, or the implementation is unknown.
    """
    return jax.tree.map(
        lambda leaf: _call("gather_pages", implementation, pages=leaf, source=source), pages
    )


def scatter_pages(
    pages: Pages,
    target: jax.Array,
    values: Pages,
    *,
    implementation: Implementation | None = None,
) -> Pages:
    """Put copies back, in place when `pages` is donated.

    Args:
      pages: of [layers, pages, ...].
      target: int32 [count], where each goes: each page at most once but page 0, the null page,
        whose content is undefined. Where it is the number of pages or more, nothing is written.
      values: of [layers, count, ...], as `gather_pages` gives.
      implementation: as in `gather_pages`.

    Returns:
      `pages` with `values[:, i]` at page `target[i]`.

    Raises:
      As `gather_pages`.
    """
    return jax.tree.map(
        lambda leaf, new: _call(
            "scatter_pages", implementation, pages=leaf, target=target, values=new
        ),
        pages,
        values,
    )


def move_pages(
    pages: Pages,
    source: jax.Array,
    target: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> Pages:
    """Copy pages to other places of the same cache, in place when `pages` is donated.

    Args:
      pages: of [layers, pages, ...].
      source: int32 [count], pages inside the cache; several may be one page.
      target: int32 [count], as in `scatter_pages`. No page is a source and a target: moves that
        overlap go through `gather_pages` and `scatter_pages`.
      implementation: as in `gather_pages`.

    Returns:
      `pages` with a copy of page `source[i]` at page `target[i]`.

    Raises:
      As `gather_pages`.
    """
    return jax.tree.map(
        lambda leaf: _call("move_pages", implementation, pages=leaf, source=source, target=target),
        pages,
    )


def _call(operation: str, implementation: str | None, **arrays: Any) -> jax.Array:
    pages, values = arrays["pages"], arrays.get("values")
    counts = {arrays[name].shape for name in ("source", "target") if name in arrays}
    if pages.ndim < 2 or len(counts) != 1 or len(*counts) != 1:
        raise ValueError(
            f"pages{pages.shape} with places{sorted(counts)}: expected [layers, pages, ...] and "
            "[count]"
        )
    if values is not None and (
        values.dtype != pages.dtype
        or values.shape != (pages.shape[0], *counts.pop(), *pages.shape[2:])
    ):
        raise ValueError(
            f"values {values.dtype}{values.shape} for pages {pages.dtype}{pages.shape} and "
            f"target{arrays['target'].shape}: expected [layers, count, ...] of the same dtype"
        )
    implementations = {
        "reference": getattr(reference, operation),
        "xla": getattr(xla, operation),
        "triton": getattr(triton, operation),
        "triton_interpreted": partial(getattr(triton, operation), interpret=True),
    }
    return dispatch.call(operation, implementations, _PREFERRED, implementation, **arrays)
