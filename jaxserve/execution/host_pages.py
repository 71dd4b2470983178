"""Host memory for KV pages, and the copies of pages to it and from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, final

import jax
import numpy as np

from jaxserve.core.errors import HostMemoryError
from jaxserve.execution.own_shards import OwnShards
from jaxserve.execution.page_calls import (
    PAGES_A_CALL,
    abstract_pages,
    by_call,
    gathered,
    scattered,
)
from jaxserve.models.batch import KVCache
from jaxserve.models.incoming import IncomingPages
from jaxserve.scheduling.plan import PageCopies
from jaxserve.steps.placement import staging_place
from jaxserve.steps.step_function import Shelf

# Bytes of pages that may be on their way to the host; they take memory of the device meanwhile.
_MAX_LEAVING_BYTES = 1 << 30
# The same of pages that come from the host, before a step waits for those that were sent first.
MAX_INCOMING_BYTES = 1 << 30


@final
class HostPages:
    """Host memory for `num_pages` pages, allocated when the first page arrives.

    An additional page, with the id `num_pages`, is the target of copies whose contents are unused.

    Pages that leave the device are gathered into a separate buffer first, because the cache is
    donated to the next step, which may write to them. A thread waits for them and stores them, one
    call after another; a thread that needs a page waits for that page alone.

    Args:
      place: sharding of the cache's buffers.
      max_incoming_bytes: see `DevicePages`.

    Raises:
      HostMemoryError: the host does not have the memory. The first method that allocates raises
        it.
    """

    def __init__(
        self, num_pages: int, place: jax.sharding.Sharding, shelf: Shelf, max_incoming_bytes: int
    ):
        self._num_pages = num_pages + 1
        self._max_incoming_bytes = max_incoming_bytes
        self._place = place
        self._own = OwnShards(place)
        self._buffers: list[np.ndarray] = []
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jaxserve-pages")
        # Of pages that are on their way: the newest copy to each.
        self._arriving: dict[int, Future[None]] = {}
        # The calls whose pages are on their way, oldest first; some have arrived.
        self._calls: deque[Future[None]] = deque()
        self.staging = staging_place(place)
        self._gather = shelf.function("gathered", gathered)
        self._scatter = shelf.function(
            "scattered", scattered, donate_argnums=0, out_shardings=place
        )

    def preparations(self, cache: KVCache) -> list[tuple[str, Callable[[], Any]]]:
        """See `DevicePages`; `cache` is abstract."""
        ids = np.zeros(PAGES_A_CALL, np.int32)
        pages = jax.tree.map(self._own.abstract, abstract_pages(cache, PAGES_A_CALL))
        return [
            ("pages to the host", partial(self._gather.prepare, cache, ids)),
            ("pages from the host", partial(self._scatter.prepare, cache, ids, pages)),
        ]

    def swap_out(self, cache: KVCache, copies: PageCopies) -> None:
        """Start copies of (device page, host page). The caller may donate the cache afterwards."""
        for some in by_call(copies):
            ids = np.zeros(PAGES_A_CALL, np.int32)
            ids[: len(some)] = [page for page, _ in some]
            leaving = jax.tree.leaves(self._gather(cache, ids))
            for each in leaving:
                each.copy_to_host_async()
            self.allocate(leaving)
            self._wait_while_full(sum(map(self._own.nbytes, leaving)))
            host_pages = tuple(host_page for _, host_page in some)
            arriving = self._copier.submit(self._store, host_pages, leaving)
            self._arriving.update((host_page, arriving) for host_page in host_pages)
            self._calls.append(arriving)

    def swap_in(self, cache: KVCache, copies: PageCopies) -> KVCache:
        """Return the cache with (host page, device page) copied into it; `cache` is donated.

        The pages take memory of the device twice until they are in the cache, so many of them come
        one part after another.
        """
        num_bytes = 0
        for some in by_call(copies):
            ids = np.zeros(PAGES_A_CALL, np.int32)
            ids[: len(some)] = [page for _, page in some]
            pages = self._read(cache, some, PAGES_A_CALL)
            num_new_bytes = sum(each.nbytes for each in pages)
            if num_bytes and num_bytes + num_new_bytes > self._max_incoming_bytes:
                jax.block_until_ready(cache)
                num_bytes = 0
            values = self._own.to_devices(pages, like=jax.tree.leaves(cache))
            cache = self._scatter(cache, ids, _as_in(cache, values))
            num_bytes += num_new_bytes
        return cache

    def incoming(self, cache: KVCache, copies: PageCopies, count: int) -> IncomingPages:
        """Return the contents of at most `count` (host page, device page), for a step to copy."""
        target = np.full(count, cache.num_pages, np.int32)
        target[: len(copies)] = [page for _, page in copies]
        pages = self._read(cache, copies, count)
        values = self._own.to_devices(pages, like=jax.tree.leaves(cache), place=self.staging)
        return IncomingPages(target, _as_in(cache, values))  # pyrefly: ignore[bad-argument-type]

    def allocate(self, like: Sequence[jax.Array]) -> None:
        """Allocate a buffer for each of these arrays, once.

        Raises:
          HostMemoryError: see the class.
        """
        if self._buffers:
            return
        try:
            self._buffers = [
                np.empty((self._num_pages, shape[0], *shape[2:]), dtype)
                for shape, dtype in ((self._own.shape(each.shape), each.dtype) for each in like)
            ]
        except MemoryError as error:
            raise HostMemoryError(
                f"the host has no memory for {self._num_pages - 1:,} pages ({error}); pass a "
                "smaller host_memory, or 0"
            ) from error

    def settle(self) -> None:
        """Wait for all pages that are on their way."""
        self._wait_for(list(self._arriving))

    def has_arrived(self, host_page: int) -> bool:
        """Whether no copy to a host page is on its way, and the newest one has not failed."""
        arriving = self._arriving.get(host_page)
        return arriving is None or (arriving.done() and arriving.exception() is None)

    def read(self, cache: KVCache, host_page: int) -> bytes:
        """Return the contents of a host page; arbitrary ones if nothing was copied to it yet."""
        self._wait_for((host_page,))
        self.allocate(jax.tree.leaves(cache))
        return b"".join(buffer[host_page].tobytes() for buffer in self._buffers)

    def write(self, cache: KVCache, host_page: int, contents: bytes) -> None:
        """Store contents that `read` returned for this cache or for one of the same layout."""
        arriving = self._arriving.pop(host_page, None)
        if arriving is not None:
            wait((arriving,))  # it may have failed: what it was to store is not wanted any more
        self.allocate(jax.tree.leaves(cache))
        start = 0
        for buffer in self._buffers:
            page = buffer[host_page]
            flat = np.frombuffer(contents, page.dtype, page.size, start)
            buffer[host_page] = flat.reshape(page.shape)
            start += page.nbytes

    def drop_arriving(self) -> None:
        """Drop the pages that are on their way; steps that failed may never bring them."""
        wait(self._calls)
        self._arriving.clear()
        self._calls.clear()

    def delete(self) -> None:
        """Free the memory."""
        self._copier.shutdown(cancel_futures=True)
        self._arriving.clear()
        self._calls.clear()
        self._buffers.clear()

    def _read(self, cache: KVCache, copies: PageCopies, count: int) -> list[np.ndarray]:
        """Return `count` pages of each buffer of the cache: those of the copies, then padding."""
        self._wait_for([host_page for host_page, _ in copies])
        self.allocate(jax.tree.leaves(cache))
        wanted = np.zeros(count, np.int64)
        wanted[: len(copies)] = [host_page for host_page, _ in copies]
        # Host pages are the leading axis, so that a page of a layer is contiguous.
        return [np.moveaxis(buffer[wanted], 0, 1) for buffer in self._buffers]

    def _wait_while_full(self, num_bytes: int) -> None:
        """Wait until one more call, of so many bytes, may be on its way."""
        most = max(1, _MAX_LEAVING_BYTES // max(1, num_bytes))
        while self._calls and (len(self._calls) >= most or self._calls[0].done()):
            self._calls.popleft().result()

    def _wait_for(self, host_pages: Iterable[int]) -> None:
        for host_page in host_pages:
            arriving = self._arriving.pop(host_page, None)
            if arriving is not None:
                arriving.result()

    def _store(self, host_pages: Sequence[int], leaving: Sequence[jax.Array]) -> None:
        """Put pages where they belong when they arrive; on the thread of copies."""
        for buffer, each in zip(self._buffers, leaving, strict=True):
            pages = self._own.to_host(each)
            for i, host_page in enumerate(host_pages):
                buffer[host_page] = pages[:, i]


def _as_in(cache: KVCache, leaves: Sequence[Any]) -> Any:
    """Return pages in the structure of the cache."""
    return jax.tree.unflatten(jax.tree.structure(cache), leaves)
