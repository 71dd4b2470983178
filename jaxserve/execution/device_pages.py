"""The page cache on the device, and how its size is changed."""

from __future__ import annotations

from typing import final

import jax

from jaxserve.execution.host_pages import HostPages, gathered
from jaxserve.memory.relocation import Moves, page_sources
from jaxserve.models.batch import KVCache
from jaxserve.models.incoming import IncomingPages
from jaxserve.scheduling.plan import PageCopies


@final
class DevicePages:
    """One page cache; `cache` is donated to every step and replaced by its result.

    Args:
      place: sharding of its buffers.
      num_host_pages: room for pages on the host.
    """

    def __init__(self, cache: KVCache, place: jax.sharding.Sharding, num_host_pages: int = 0):
        self.cache = cache
        self._host = HostPages(num_host_pages, place)
        self._copy = jax.jit(gathered, out_shardings=place)

    @property
    def num_buffers(self) -> int:
        """See `ModelExecutor`; scales have buffers of their own."""
        sizes = [leaf.nbytes for leaf in jax.tree.leaves(self.cache)]
        return sum(sizes) // max(sizes)

    @property
    def num_pages(self) -> int:
        return self.cache.num_pages

    def swap(self, out: PageCopies, back: PageCopies) -> None:
        """Copy pages to the host, (device page, host page), and then others back from it."""
        self._host.swap_out(self.cache, out)
        if back:
            self.cache = self._host.swap_in(self.cache, back)

    def incoming(self, back: PageCopies, count: int) -> IncomingPages:
        """Up to `count` copies back from the host, for a step to make."""
        return self._host.incoming(self.cache, back, count)

    def read_host_page(self, host_page: int) -> bytes:
        """See `HostMemory`."""
        return self._host.read(host_page)

    def write_host_page(self, host_page: int, contents: bytes) -> None:
        """See `HostMemory`."""
        self._host.write(self.cache, host_page, contents)

    def resize(self, num_pages: int, moves: Moves) -> None:
        """Go on with another number of pages; see `Executor.resize`.

        One buffer after the other is copied and deleted: at the peak there is, beside the larger
        of the two caches, one buffer of the smaller. That is the keys of one layer where layers
        have buffers of their own, and half that cache where all layers share two.
        """
        self._host.settle(wait=True)  # what is on its way takes memory of the device
        old_num_pages = self.num_pages
        try:
            self._bring_to(num_pages, moves)
        except Exception:
            self._bring_to(old_num_pages, [(new, old) for old, new in moves])
            raise

    def delete(self) -> None:
        self._host.delete()
        for leaf in jax.tree.leaves(self.cache):
            leaf.delete()

    def _bring_to(self, num_pages: int, moves: Moves) -> None:
        """Copy every buffer that has another size."""
        buffers, structure = jax.tree.flatten(self.cache)
        try:
            for i, old in enumerate(buffers):
                if old.shape[1] != num_pages:
                    source = page_sources(old.shape[1], num_pages, moves)
                    buffers[i] = jax.block_until_ready(self._copy(old, source))
                    old.delete()
        finally:
            self.cache = jax.tree.unflatten(structure, buffers)
