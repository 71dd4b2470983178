"""Copies of KV pages between the device and the host, and into a cache of another size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.execution.host_pages import MAX_INCOMING_BYTES, HostPages
from jaxserve.execution.page_calls import abstract_pages, gathered
from jaxserve.memory.relocation import Moves, page_sources
from jaxserve.models.batch import KVCache
from jaxserve.models.incoming import IncomingPages
from jaxserve.scheduling.plan import PageCopies
from jaxserve.steps.step_function import Shelf, abstract, unkept


@final
class DevicePages:
    """The page cache on the device, and the pages that were copied from it to the host.

    Every step donates `cache` and replaces it with its result.

    Args:
      place: sharding of the cache's buffers.
      num_host_pages: number of pages that fit on the host.
      shelf: where executables are kept; by default nowhere.
      max_incoming_bytes: of pages that may be on their way from the host.
      copy: function that takes a buffer and an array of page ids and returns these pages; by
        default `gathered`, jitted here.
    """

    def __init__(
        self,
        cache: KVCache,
        place: jax.sharding.Sharding,
        num_host_pages: int = 0,
        shelf: Shelf | None = None,
        *,
        max_incoming_bytes: int = MAX_INCOMING_BYTES,
        copy: Callable[[jax.Array, np.ndarray], jax.Array] | None = None,
    ):
        self.cache = cache
        self.place = place
        self._host = HostPages(num_host_pages, place, shelf or unkept(place), max_incoming_bytes)
        self._copy = copy or jax.jit(gathered, out_shardings=place)

    @property
    def num_buffers(self) -> int:
        """See `ModelExecutor`. Scales have separate buffers."""
        sizes = [leaf.nbytes for leaf in jax.tree.leaves(self.cache.pages)]
        return sum(sizes) // max(sizes, default=1)

    @property
    def num_pages(self) -> int:
        return self.cache.num_pages

    @property
    def shard_bytes(self) -> int:
        """Bytes of the cache on one device."""
        leaves = jax.tree.leaves(self.cache)
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)

    @property
    def page_shape(self) -> tuple[Any, ...]:
        """Shape and dtype of a page in the first buffer: what the contents of a page depend on."""
        leaf = jax.tree.leaves(self.cache)[0]
        return (leaf.shape[0], *leaf.shape[2:], str(leaf.dtype))

    @property
    def host_page_bytes(self) -> int:
        """Bytes of a page on the host: the length of what `read_host_page` returns."""
        return sum(leaf.nbytes // leaf.shape[1] for leaf in jax.tree.leaves(self.cache))

    def replace(self, cache: KVCache) -> None:
        """Go on with the result of a function that was given the cache, and may have donated it."""
        self.cache = cache

    def swap(self, out: PageCopies, back: PageCopies) -> None:
        """Copy `out`, (device page, host page), to the host, then `back`, (host page, device page).

        The copies to the host go on in the background; see `HostPages.swap_out`.
        """
        self._host.swap_out(self.cache, out)
        if back:
            self.cache = self._host.swap_in(self.cache, back)

    def incoming(self, back: PageCopies, count: int) -> IncomingPages:
        """Return the pages of at most `count` copies from the host, for a step to write."""
        return self._host.incoming(self.cache, back, count)

    def preparations(self) -> list[tuple[str, Callable[[], Any]]]:
        """Return (name, function) of the copies; a function makes its executable, on any thread."""
        return self._host.preparations(abstract(self.cache))

    def abstract_incoming(self, count: int) -> IncomingPages | None:
        """Return the shapes of `incoming`, or None where `count` is 0."""
        if not count:
            return None
        values = abstract_pages(self.cache, count, sharding=self._host.staging)
        return IncomingPages(np.zeros(count, np.int32), values)  # pyrefly: ignore[bad-argument-type]

    def allocate_host(self) -> None:
        """Allocate the memory of the host pages before the first page arrives.

        Raises:
          HostMemoryError: the host does not have the memory.
        """
        self._host.allocate(jax.tree.leaves(self.cache))

    def has_arrived(self, host_page: int) -> bool:
        """See `HostMemory`."""
        return self._host.has_arrived(host_page)

    def read_host_page(self, host_page: int) -> bytes:
        """See `HostMemory`."""
        return self._host.read(self.cache, host_page)

    def write_host_page(self, host_page: int, contents: bytes) -> None:
        """See `HostMemory`."""
        self._host.write(self.cache, host_page, contents)

    def resize(self, num_pages: int, moves: Moves) -> None:
        """Continue with another number of pages; see `Executor.resize`.

        It copies and deletes one buffer after the other. At the peak the device holds the larger
        of the two caches and one buffer of the smaller. That buffer is the keys of one layer if
        each layer has its own buffers, and half of the smaller cache if all layers share two.
        """
        self._host.settle()  # copies in flight hold device memory
        old_num_pages = self.num_pages
        try:
            self._bring_to(num_pages, moves)
        except Exception:
            self._bring_to(old_num_pages, [(new, old) for old, new in moves])
            raise

    def drop(self) -> None:
        """Free the memory on the device. `cache` has shapes only, until `replace`."""
        leaves = jax.tree.leaves(self.cache)
        self.cache = abstract(self.cache)
        for leaf in leaves:
            if isinstance(leaf, jax.Array):
                leaf.delete()

    def renew(self) -> None:
        """Replace the cache by zeros of the same shapes, after a step that may have donated it."""
        like = abstract(self.cache)
        for leaf in jax.tree.leaves(self.cache):
            leaf.delete()
        self.cache = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), like
        )
        self._host.drop_arriving()

    def delete(self) -> None:
        """Free the memory on the device and on the host."""
        self._host.delete()
        self.drop()

    def _bring_to(self, num_pages: int, moves: Moves) -> None:
        """Copy every buffer that does not have `num_pages` pages yet."""
        states = self.cache.states
        buffers, structure = jax.tree.flatten(self.cache.pages)
        try:
            for i, old in enumerate(buffers):
                if old.shape[1] != num_pages:
                    source = page_sources(old.shape[1], num_pages, moves)
                    buffers[i] = jax.block_until_ready(self._copy(old, source))
                    old.delete()
        finally:
            self.cache = replace(jax.tree.unflatten(structure, buffers), states=states)
