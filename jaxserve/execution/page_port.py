"""KV pages out of the cache of a device group, for one of another process, and into it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import numpy as np

from jaxserve.execution.page_calls import PAGES_A_CALL
from jaxserve.execution.page_copies import DevicePages
from jaxserve.execution.page_parts import (
    copy_of_part,
    gather_parts,
    joined_shape,
    kinds,
    own_parts,
    scatter_pieces,
)
from jaxserve.memory.page_pool import NULL_PAGE
from jaxserve.steps.placement import Placement
from jaxserve.steps.step_function import StepFunction, unkept


@final
@dataclass(frozen=True)
class Cut:
    """How a group's cache is cut by KV head.

    Attributes:
      num_heads: KV heads of the cache, repeated ones included.
      num_parts: shards, each with a part of them.
    """

    num_heads: int
    num_parts: int


@final
class TakenPages:
    """At most `PAGES_A_CALL` pages, gathered in the parts of the group that gets them.

    Attributes:
      pages: their ids.

    Args:
      parts: for each kind of array its parts, with a copy on every device of the group.
    """

    def __init__(self, pages: Sequence[int], parts: Sequence[Sequence[jax.Array]]):
        self.pages = tuple(pages)
        self._kinds = parts

    def is_ready(self) -> bool:
        """Return whether the pages have been gathered."""
        leaves: list[Any] = jax.tree.leaves(self._kinds)
        return all(leaf.is_ready() for leaf in leaves)

    def part(self, index: int) -> list[jax.Array]:
        """Return a part, an array of one device for each kind of array."""
        return [copy_of_part(parts[index], index) for parts in self._kinds]

    def start_to_host(self) -> None:
        """Start to copy all parts to the host."""
        for leaf in jax.tree.leaves(self._kinds):
            leaf.copy_to_host_async()

    def on_host(self) -> list[list[np.ndarray]]:
        """Wait for the pages; return the arrays of each part.

        Raises:
          jax.errors.JaxRuntimeError: the devices have failed.
        """
        return [list(map(np.asarray, part)) for part in zip(*self._kinds, strict=True)]


@final
class PagePort:
    """The way of pages out of the cache of a device group, and into it.

    Every process of the group makes the same calls in the same order, between steps. The caches at
    both ends have the same layers and formats; they may be cut differently. Copies have a fixed
    number of pages, so that nothing compiles after `warm_up`.

    Args:
      other: how the cache of the other group is cut.

    Attributes:
      devices: this process's devices of the group, and the index of the part that each has.
    """

    def __init__(self, pool: DevicePages, other: Cut):
        place = Placement.like(pool.place)
        own = cut_of(pool)
        self.devices = tuple(own_parts(pool.place, own.num_parts))
        self._pool = pool
        self._place = place
        self._own = own
        layers = range(sum(leaf.shape[0] for leaf in pool.cache.k_pages))
        pieces = ((layers, (other.num_heads, other.num_parts)),)
        self._take = StepFunction(
            *("taken", partial(gather_parts, pieces=pieces), unkept(pool.place)),
            num_fixed=0,
            out_shardings=place.whole,
        )
        self._put = StepFunction(
            *("put", scatter_pieces, unkept(pool.place)),
            num_fixed=0,
            donate_argnums=0,
            out_shardings=pool.place,
        )

    def take(self, pages: Sequence[int]) -> list[TakenPages]:
        """Start to gather these pages; the caller may donate the cache afterwards."""
        return [
            self._taken(pages[start : start + PAGES_A_CALL])
            for start in range(0, len(pages), PAGES_A_CALL)
        ]

    def put(
        self,
        pages: Sequence[int],
        parts: Sequence[Sequence[jax.Array]],
        dropped: Collection[int] = (),
    ) -> None:
        """Write pages to the cache, for all later steps.

        Args:
          pages: their ids, at most `PAGES_A_CALL`.
          parts: for each of `devices` its part of every kind of array, on that device.
          dropped: pages that keep their contents.
        """
        ids = np.full(PAGES_A_CALL, self._pool.num_pages, np.int32)  # past the end: skipped
        for i, page in enumerate(pages):
            if page not in dropped:
                ids[i] = page
        arrays = tuple(map(self._joined, zip(*parts, strict=True)))
        with self._place.in_force():
            self._pool.replace(self._put(self._pool.cache, ids, (arrays,)))

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of one of this group's parts of a full call."""
        shapes = []
        for leaves in filter(None, kinds(self._pool.cache)):
            _, _, heads, *rest = leaves[0].shape
            num_layers = sum(leaf.shape[0] for leaf in leaves)
            shape = (num_layers, PAGES_A_CALL, heads // self._own.num_parts, *rest)
            shapes.append(jax.ShapeDtypeStruct(shape, leaves[0].dtype))
        return shapes

    def warm_up(self) -> None:
        """Make every copy once; no page changes."""
        self.take((NULL_PAGE,))
        zeros = [np.zeros(shape.shape, shape.dtype) for shape in self.shapes()]
        self.put((), [jax.device_put(zeros, device) for device, _ in self.devices])

    def _taken(self, pages: Sequence[int]) -> TakenPages:
        ids = np.full(PAGES_A_CALL, NULL_PAGE, np.int32)
        ids[: len(pages)] = pages
        with self._place.in_force():
            (arrays,) = self._take(self._pool.cache, ids)
        return TakenPages(pages, arrays)

    def _joined(self, parts: Sequence[jax.Array]) -> jax.Array:
        shape = joined_shape(parts[0], self._own.num_parts)
        return jax.make_array_from_single_device_arrays(shape, self._pool.place, list(parts))


def cut_of(pool: DevicePages) -> Cut:
    """Return how a cache is cut."""
    return Cut(pool.cache.k_pages[0].shape[2], Placement.like(pool.place).num_shards)
