"""Copies of KV pages of a device group to host memory, and from there, for another process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, final

import jax
import numpy as np

from jaxserve.execution.page_copies import PAGES_A_CALL, DevicePages, gathered, scattered
from jaxserve.memory.page_pool import NULL_PAGE
from jaxserve.steps.placement import Placement
from jaxserve.steps.step_function import StepFunction, unkept


@final
@dataclass(frozen=True)
class PagesOnHost:
    """At most `PAGES_A_CALL` pages in host memory.

    Attributes:
      pages: their ids; None where a page is not to be written.
      leaves: the pages of each array of the cache, [layers, PAGES_A_CALL, kv_heads, ...].
    """

    pages: tuple[int | None, ...]
    leaves: tuple[np.ndarray, ...]

    def without(self, dropped: set[int]) -> PagesOnHost:
        """Return the same, with these pages not to be written."""
        return replace(self, pages=tuple(None if p in dropped else p for p in self.pages))


@final
class TakenPages:
    """At most `PAGES_A_CALL` pages on their way to host memory."""

    def __init__(self, pages: Sequence[int], leaves: Sequence[jax.Array]):
        self._pages = tuple(pages)
        self._leaves = tuple(leaves)
        for leaf in leaves:
            leaf.copy_to_host_async()

    def is_ready(self) -> bool:
        """Return whether the pages have been gathered."""
        leaves: list[Any] = list(self._leaves)
        return all(leaf.is_ready() for leaf in leaves)

    def read(self) -> PagesOnHost:
        """Wait for the pages, and return them.

        Raises:
          jax.errors.JaxRuntimeError: the devices have failed.
        """
        return PagesOnHost(self._pages, tuple(np.asarray(leaf) for leaf in self._leaves))


@final
class PagePort:
    """The way of pages out of the cache of a device group into host memory, and back into one.

    Every process of the group makes the same calls in the same order, between steps. The caches at
    both ends have the same layers and formats; numbers of tensor shards may differ. Copies have a
    fixed number of pages, so that nothing compiles after `warm_up`.
    """

    def __init__(self, pool: DevicePages):
        self._pool = pool
        self._place = Placement.like(pool.place)
        self._take = StepFunction(
            *("taken whole", gathered, unkept(pool.place)),
            num_fixed=0,
            out_shardings=self._place.whole,
        )
        self._put = StepFunction(
            *("put from the host", scattered, unkept(pool.place)),
            num_fixed=0,
            donate_argnums=0,
            out_shardings=pool.place,
        )

    def take(self, pages: Sequence[int]) -> list[TakenPages]:
        """Start to copy these pages to the host; the caller may donate the cache afterwards."""
        return [
            self._taken(pages[start : start + PAGES_A_CALL])
            for start in range(0, len(pages), PAGES_A_CALL)
        ]

    def put(self, pages: PagesOnHost) -> None:
        """Write pages to the cache, for all later steps."""
        ids = np.full(PAGES_A_CALL, self._pool.num_pages, np.int32)  # past the end: skipped
        for i, page in enumerate(pages.pages):
            if page is not None:
                ids[i] = page
        cache = self._pool.cache
        values = [
            self._placed(_with_heads(new, old.shape[2]))
            for new, old in zip(pages.leaves, jax.tree.leaves(cache), strict=True)
        ]
        with self._place.in_force():
            self._pool.replace(
                self._put(cache, ids, jax.tree.unflatten(jax.tree.structure(cache), values))
            )

    def warm_up(self) -> None:
        """Make every copy once; no page changes."""
        for taken in self.take((NULL_PAGE,)):
            self.put(taken.read().without({NULL_PAGE}))

    def _taken(self, pages: Sequence[int]) -> TakenPages:
        ids = np.full(PAGES_A_CALL, NULL_PAGE, np.int32)
        ids[: len(pages)] = pages
        with self._place.in_force():
            return TakenPages(pages, jax.tree.leaves(self._take(self._pool.cache, ids)))

    def _placed(self, values: np.ndarray) -> jax.Array:
        """Return pages on the devices, each of which gets its own heads."""
        place = self._place.pages
        return jax.make_array_from_callback(values.shape, place, lambda index: values[index])


def _with_heads(pages: np.ndarray, num_heads: int) -> np.ndarray:
    """Return pages [layers, pages, heads, ...] with fewer or more copies of each KV head."""
    common = gcd(pages.shape[2], num_heads)
    return np.repeat(pages[:, :, :: pages.shape[2] // common], num_heads // common, axis=2)
