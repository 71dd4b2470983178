"""The public signatures of page copies, and the choice of their implementation.

`pages` is any pytree of arrays [layers, pages, ...], such as a cache's keys, values and scales;
each array is copied. `implementation` is "triton" on NVIDIA GPUs and "xla" elsewhere; errors are as
in `dispatch`.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import jax
from jaxtyping import Array, Int

from jaxserve.kernels import dispatch
from jaxserve.kernels.page_copy import reference, xla

Implementation = Literal["reference", "xla", "triton", "triton_interpreted"]
Pages = TypeVar("Pages")

_PREFERRED = {"cuda": ("triton",)}

IMPLEMENTATIONS = ("reference", "xla", "triton", "triton_interpreted")


def gather_pages(
    pages: Pages, source: Int[Array, " count"], *, implementation: Implementation | None = None
) -> Pages:
    """Copy pages into new arrays, for a swap to the host or for a cache of another size.

    Args:
      pages: arrays [layers, pages, ...].
      source: int32 [count], valid page ids in any order; ids may repeat.

    Returns:
      Arrays [layers, count, ...]; [:, i] is page `source[i]`.
    """
    return jax.tree.map(
        lambda leaf: _call("gather_pages", implementation, pages=leaf, source=source), pages
    )


def scatter_pages(
    pages: Pages,
    target: Int[Array, " count"],
    values: Pages,
    *,
    implementation: Implementation | None = None,
) -> Pages:
    """Write copies into pages, in place when `pages` is donated.

    Args:
      pages: arrays [layers, pages, ...].
      target: int32 [count], page ids; each at most once, except pages without contents, such as
        the null page, whose content is then undefined. Ids >= the number of pages are skipped.
      values: arrays [layers, count, ...], as from `gather_pages`.

    Returns:
      `pages` with `values[:, i]` at page `target[i]`.
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
    source: Int[Array, " count"],
    target: Int[Array, " count"],
    *,
    implementation: Implementation | None = None,
) -> Pages:
    """Copy pages to other pages of the same cache, in place when `pages` is donated.

    Args:
      pages: arrays [layers, pages, ...].
      source: int32 [count], valid page ids; ids may repeat.
      target: int32 [count], as in `scatter_pages`. No page may be both a source and a target; for
        overlapping moves use `gather_pages` and `scatter_pages`.

    Returns:
      `pages` with a copy of page `source[i]` at page `target[i]`.
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
            f"pages{pages.shape} and page ids{sorted(counts)} do not fit; expected "
            "[layers, pages, ...] and [count]"
        )
    if values is not None and (
        values.dtype != pages.dtype
        or values.shape != (pages.shape[0], *counts.pop(), *pages.shape[2:])
    ):
        raise ValueError(
            f"values {values.dtype}{values.shape} do not fit pages {pages.dtype}{pages.shape} and "
            f"target{arrays['target'].shape}; pass [layers, count, ...] of the same dtype"
        )
    implementations = {
        "reference": getattr(reference, operation),
        "xla": getattr(xla, operation),
        **dispatch.by_triton("page_copy", operation),
    }
    return dispatch.call(operation, implementations, _PREFERRED, implementation, **arrays)
