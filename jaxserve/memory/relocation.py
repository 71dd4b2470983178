"""Brings the pages of a pool below a new end with the fewest moves."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from jaxserve.memory.page_pool import NULL_PAGE

Moves = Sequence[tuple[int, int]]


def fewest_moves(owned: Collection[int], num_pages: int) -> list[tuple[int, int]]:
    """Return (from, to) of every page of `owned` that does not lie in a pool of `num_pages`.

    Pages at or above the new end have to move, and no other does, each once, onto a page below it
    that is not owned: the lowest first. Flover's memory shuffle (Algorithm 3) looks for the window
    that already holds the most; here the window is given, and begins behind the null page.

    Raises:
      ValueError: more pages are owned than the pool has beside the null page.
    """
    if len(owned) > num_pages - 1:
        raise ValueError(f"{len(owned)} owned pages do not fit into {num_pages - 1}")
    kept = {page for page in owned if page < num_pages}
    holes = (page for page in range(NULL_PAGE + 1, num_pages) if page not in kept)
    strays = sorted(page for page in owned if page >= num_pages)
    return list(zip(strays, holes, strict=False))


def page_sources(old_num_pages: int, num_pages: int, moves: Moves) -> np.ndarray:
    """Return which of the old pages each page is a copy of, int32 [num_pages].

    Pages that the old pool did not have are copies of the null page.
    """
    source = np.arange(num_pages, dtype=np.int32)
    source[old_num_pages:] = NULL_PAGE
    for old, new in moves:
        source[new] = old
    return source


def page_targets(old_num_pages: int, num_pages: int, moves: Moves) -> np.ndarray:
    """Return where each page went, int32 [old_num_pages]; the null page for those that are gone."""
    target = np.arange(old_num_pages, dtype=np.int32)
    target[num_pages:] = NULL_PAGE
    for old, new in moves:
        target[old] = new
    return target
