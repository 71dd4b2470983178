"""KV pages on the host: copied there while the device goes on, and brought back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, final

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxserve.core.errors import DeviceMemoryError
from jaxserve.models.batch import KVCache
from jaxserve.models.incoming import IncomingPages
from jaxserve.scheduling.plan import PageCopies
from jaxserve.steps.placement import staging_place
from pallas_kernels import gather_pages, scatter_pages
from sharding.shards import TENSOR, over_tensor

# A cache, or one of its buffers.
_Cache = TypeVar("_Cache")

# Pages that one call copies; fewer are filled up with the null page.
PAGES_A_CALL = 8
# Buffers are split by KV head.
_BUFFERS = P(None, None, TENSOR)


@final
class HostPages:
    """Memory for `num_pages` pages, taken from the host when the first of them arrives.

    Page `num_pages` is one more, for copies that nobody wants back.

    What leaves the device is gathered into a buffer of its own first: the pages may be written by
    the very next step, which the cache is donated to.

    Args:
      place: sharding of the cache's buffers.

    Raises:
      DeviceMemoryError: by whatever comes first, where the host does not have the memory.
    """

    def __init__(self, num_pages: int, place: jax.sharding.Sharding):
        self._num_pages = num_pages + 1
        self._place = place
        self._buffers: list[np.ndarray] = []
        self._leaving: deque[tuple[tuple[int, ...], list[jax.Array]]] = deque()
        self._gather = jax.jit(gathered)
        self._scatter = jax.jit(scattered, donate_argnums=0, out_shardings=place)

    def swap_out(self, cache: KVCache, copies: PageCopies) -> None:
        """Begin to copy (device page, host page); the cache may be donated afterwards."""
        self.settle(wait=False)
        for some in _batched(copies):
            ids = np.zeros(PAGES_A_CALL, np.int32)
            ids[: len(some)] = [page for page, _ in some]
            leaving = jax.tree.leaves(self._gather(cache, ids))
            for each in leaving:
                each.copy_to_host_async()
            self._leaving.append((tuple(host_page for _, host_page in some), leaving))

    def swap_in(self, cache: KVCache, copies: PageCopies) -> KVCache:
        """The cache with (host page, device page) copied into it; the one given is gone."""
        self.settle(wait=True)
        for some in _batched(copies):
            ids = np.zeros(PAGES_A_CALL, np.int32)
            ids[: len(some)] = [page for _, page in some]
            cache = self._scatter(cache, ids, self._read(cache, some, PAGES_A_CALL))
        return cache

    def incoming(self, cache: KVCache, copies: PageCopies, count: int) -> IncomingPages:
        """Up to `count` (host page, device page), for a step that brings so many itself."""
        self.settle(wait=True)
        self._allocate(jax.tree.leaves(cache))
        target = np.full(count, cache.num_pages, np.int32)
        target[: len(copies)] = [page for _, page in copies]
        values = self._read(cache, copies, count)
        staged = jax.device_put(values, staging_place(self._place))
        return IncomingPages(target, staged)  # pyright: ignore[reportArgumentType]

    def _read(self, cache: KVCache, copies: PageCopies, count: int) -> KVCache:
        """`count` pages as the cache has them: those of the copies, then any."""
        wanted = np.zeros(count, np.int64)
        wanted[: len(copies)] = [host_page for host_page, _ in copies]
        # Host pages come first in the buffers, so that a page of a layer is one stretch.
        values = [np.moveaxis(buffer[wanted], 0, 1) for buffer in self._buffers]
        return jax.tree.unflatten(jax.tree.structure(cache), values)

    def settle(self, *, wait: bool) -> None:
        """Put what has arrived into its place, and with `wait` all that is on its way."""
        while self._leaving and (wait or all(map(_is_ready, self._leaving[0][1]))):
            host_pages, arrived = self._leaving.popleft()
            self._allocate(arrived)
            for buffer, each in zip(self._buffers, arrived, strict=True):
                pages = np.asarray(each)
                for i, host_page in enumerate(host_pages):
                    buffer[host_page] = pages[:, i]

    def read(self, host_page: int) -> bytes:
        """Contents of a page that was copied here."""
        self.settle(wait=True)
        return b"".join(buffer[host_page].tobytes() for buffer in self._buffers)

    def write(self, cache: KVCache, host_page: int, contents: bytes) -> None:
        """Put something into a page that `read` gave, for this cache or one of its kind."""
        self.settle(wait=True)
        self._allocate(jax.tree.leaves(cache))
        start = 0
        for buffer in self._buffers:
            page = buffer[host_page]
            flat = np.frombuffer(contents, page.dtype, page.size, start)
            buffer[host_page] = flat.reshape(page.shape)
            start += page.nbytes

    def delete(self) -> None:
        self._leaving.clear()
        self._buffers.clear()

    def _allocate(self, like: Sequence[jax.Array]) -> None:
        """A buffer for each of these, once."""
        if self._buffers:
            return
        try:
            self._buffers = [
                np.empty((self._num_pages, pages.shape[0], *pages.shape[2:]), pages.dtype)
                for pages in like
            ]
        except MemoryError as error:
            raise DeviceMemoryError(
                f"the host has no memory for {self._num_pages - 1:,} pages ({error}); give a "
                "smaller host_memory, or 0"
            ) from error


def _is_ready(array: Any) -> bool:
    """Whether a jax.Array has been computed."""
    return array.is_ready()


def _batched(copies: PageCopies) -> Iterator[PageCopies]:
    for start in range(0, len(copies), PAGES_A_CALL):
        yield copies[start : start + PAGES_A_CALL]


def gathered(
    cache: _Cache,
    pages: jax.Array,  # int32 [count]
) -> _Cache:
    """Buffers [layers, count, kv_heads, ...], whose page i is page `pages[i]` of the cache's."""
    return over_tensor(gather_pages, in_specs=(_BUFFERS, P()), out_specs=_BUFFERS)(cache, pages)


def scattered(
    cache: _Cache,
    pages: jax.Array,  # int32 [count]; past the end to skip
    values: _Cache,  # as `gathered` gives
) -> _Cache:
    """The cache with these pages put back into it."""
    specs = (_BUFFERS, P(), _BUFFERS)
    return over_tensor(scatter_pages, in_specs=specs, out_specs=_BUFFERS)(cache, pages, values)
