"""KV pages on the device and on the host, and the copies between the two."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import HostMemoryError
from jaxserve.kernels import gather_pages, scatter_pages
from jaxserve.memory.page_pool import Moves, page_sources
from jaxserve.models.batch import IncomingPages, KVCache
from jaxserve.models.config import DecoderConfig
from jaxserve.scheduling.kv.manager import SwapCosts
from jaxserve.scheduling.plan import PageCopies, StepPlan
from jaxserve.sharding.shards import TENSOR, over_tensor
from jaxserve.steps.step_function import Shelf, abstract, staging_place, unkept

# A whole cache or one of its buffers.
_Cache = TypeVar("_Cache")
_Item = TypeVar("_Item")

# Pages that one call copies. A call with fewer copies the null page for the rest.
PAGES_A_CALL = 8
# Buffers are split by KV head.
_BUFFERS = P(None, None, TENSOR)

# The least and most bytes of pages in transit in one direction, and how many times they fit in the
# pool. They take device memory beside it; on a GPU a pool leaves 8 % of what was free.
_LEAST_TRANSIT_BYTES, _MOST_TRANSIT_BYTES, _TRANSITS_A_POOL = 64 << 20, 1 << 30, 32


def num_incoming(config: EngineConfig, plan: StepPlan) -> int:
    """Return the number of pages that the mixed step copies from the host layer by layer, or 0.

    It is 0 if one copy call before the step is enough.
    """
    is_one_call = plan.is_decode_loop or len(plan.swaps_in) <= PAGES_A_CALL
    return 0 if is_one_call else min(config.num_incoming_pages, len(plan.swaps_in))


def transit_bytes(pool_bytes: int) -> int:
    """Return the maximum bytes of pages in transit in one direction, to the host or from it."""
    share = max(_LEAST_TRANSIT_BYTES, pool_bytes // _TRANSITS_A_POOL)
    return min(_MOST_TRANSIT_BYTES, share)


def abstract_pages(cache: KVCache, count: int, **placed: Any) -> Any:
    """Return the shapes of `count` pages in the structure of a cache."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (leaf.shape[0], count, *leaf.shape[2:]), leaf.dtype, **placed
        ),
        cache,
    )


def chunks(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    """Yield the items of each call, at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def gathered(
    cache: _Cache,
    pages: jax.Array,  # int32 [count]
) -> _Cache:
    """Return buffers [layers, count, kv_heads, ...] whose page i is page `pages[i]` of `cache`."""
    return over_tensor(gather_pages, in_specs=(_BUFFERS, P()), out_specs=_BUFFERS)(cache, pages)


def scattered(
    cache: _Cache,
    pages: jax.Array,  # int32 [count]; an id past the end is skipped
    values: _Cache,  # as `gathered` returns
) -> _Cache:
    """Return `cache` with these pages written to it."""
    specs = (_BUFFERS, P(), _BUFFERS)
    return over_tensor(scatter_pages, in_specs=specs, out_specs=_BUFFERS)(cache, pages, values)


def to_host(pieces: Sequence[jax.Array]) -> np.ndarray:
    """Wait for the pieces that `OwnShards.to_staging` returned, and join them."""
    arrays = [np.asarray(piece) for piece in pieces]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=2)


@final
class OwnShards:
    """This process's part of arrays [layers, pages, kv_heads, ...] that are split by KV head.

    If all devices belong to this process, it has all heads, and jitted functions take NumPy arrays.
    """

    def __init__(self, place: jax.sharding.Sharding):
        self._place = place
        self._has_all = place.is_fully_addressable

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self._has_all:
            return shape
        num_heads = sum(stop - start for start, stop in self._ranges(shape))
        return (*shape[:2], num_heads, *shape[3:])

    def nbytes(self, array: jax.Array | jax.ShapeDtypeStruct) -> int:
        return math.prod(self.shape(array.shape)) * array.dtype.itemsize

    def to_staging(self, array: jax.Array) -> list[jax.Array]:
        """Start copying this process's part to pinned host memory; return its pieces by KV head.

        CUDA copies to other host memory through a buffer of its own, and not beside kernels
        (programming guide, "Page-locked host memory").
        """
        pieces = {0: array}
        if not self._has_all:
            pieces = {shard.index[2].start or 0: shard.data for shard in array.addressable_shards}
        return [
            jax.device_put(piece, staging_place(piece.sharding))
            for _, piece in sorted(pieces.items())
        ]

    def to_devices(
        self,
        values: Sequence[np.ndarray],
        like: Sequence[jax.Array],
        place: jax.sharding.Sharding | None = None,
    ) -> list[Any]:
        """Return arrays for a jitted function from this process's part of each.

        They have all KV heads, as `like`, and go to `place`, by default that of `like`.
        """
        if self._has_all:
            return list(values) if place is None else jax.device_put(list(values), place)
        place = place or self._place
        return [
            self._spread(part, whole.shape[2], place)
            for part, whole in zip(values, like, strict=True)
        ]

    def abstract(self, array: jax.ShapeDtypeStruct) -> Any:
        """Return the placeholder of an array of `to_devices`, to prepare an executable."""
        if self._has_all:
            return np.broadcast_to(np.zeros((), array.dtype), array.shape)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._place)

    def _spread(self, part: np.ndarray, num_heads: int, place: jax.sharding.Sharding) -> jax.Array:
        shape = (*part.shape[:2], num_heads, *part.shape[3:])
        ranges = self._ranges(shape)
        offsets = accumulate((stop - start for start, stop in ranges), initial=0)
        offset_of = dict(zip((start for start, _ in ranges), offsets, strict=False))

        def of_device(index: Any) -> np.ndarray:
            start, stop, _ = index[2].indices(num_heads)
            return part[:, :, offset_of[start] : offset_of[start] + stop - start]

        return jax.make_array_from_callback(shape, place, of_device)

    def _ranges(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return (first, end) of the KV heads of each own shard, in order, copies once."""
        found = self._place.addressable_devices_indices_map(shape).values()
        return sorted({index[2].indices(shape[2])[:2] for index in found if index is not None})


@final
class HostEntries:
    """Copies on the host of entries of device buffers [layers, entries, ...]: pages, or states.

    An entry has `entry_bytes` in this process.

    The memory is allocated when the first entry arrives; the first method that allocates raises
    HostMemoryError if the host does not have it. An additional entry, with the id `num_entries`, is
    the target of copies whose contents are unused. Entries that leave the device are in a separate
    buffer, because theirs is donated to the next step, which may write to them. The device copies
    that to pinned host memory beside its steps. A thread stores them, one call after another; a
    caller that needs an entry waits for that entry alone.

    Args:
      leaves: the buffers, or their shapes.
      shards: this process's part of each.
      entries_a_call: entries that one call copies.
      max_leaving_bytes: maximum size of the entries in transit to the host, but at least one
        call's.
      read: waits for entries in pinned host memory, and returns them.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        shards: Sequence[OwnShards],
        num_entries: int,
        *,
        entries_a_call: int,
        max_leaving_bytes: int,
        read: Callable[[Sequence[jax.Array]], np.ndarray] = to_host,
    ):
        pairs = list(zip(shards, leaves, strict=True))
        self.entry_bytes = sum(own.nbytes(leaf) // leaf.shape[1] for own, leaf in pairs)
        self._shapes = [(own.shape(leaf.shape), leaf.dtype) for own, leaf in pairs]
        self._shards = shards
        self._num_entries = num_entries + 1
        self._max_calls = max(1, max_leaving_bytes // max(1, entries_a_call * self.entry_bytes))
        self._read_pieces = read
        self._buffers: list[np.ndarray] = []
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jaxserve-pages")
        # The newest copy to each entry in transit.
        self._arriving: dict[int, Future[None]] = {}
        # The calls whose entries are in transit, oldest first; some have arrived.
        self._calls: deque[Future[None]] = deque()

    def allocate(self) -> None:
        """Allocate the memory now, once."""
        if self._buffers:
            return
        try:
            self._buffers = [
                np.empty((self._num_entries, shape[0], *shape[2:]), dtype)
                for shape, dtype in self._shapes
            ]
        except MemoryError as error:
            raise HostMemoryError(
                f"the host has no memory for {self._num_entries - 1:,} pages or states ({error}); "
                "pass a smaller host_memory, or 0"
            ) from error

    def wait_for_room(self) -> None:
        """Wait until another call may leave the device."""
        self.allocate()
        calls = self._calls
        while calls and (len(calls) >= self._max_calls or calls[0].done()):
            calls.popleft().result()

    def send(self, leaving: Sequence[jax.Array], host_entries: Sequence[int]) -> None:
        """Start to copy buffers of entries, after `wait_for_room`; the first ones are stored."""
        pieces = [own.to_staging(x) for own, x in zip(self._shards, leaving, strict=True)]
        arriving = self._copier.submit(self._store, host_entries, pieces)
        self._arriving.update((entry, arriving) for entry in host_entries)
        self._calls.append(arriving)

    def _store(self, host_entries: Sequence[int], leaving: Sequence[list[jax.Array]]) -> None:
        """Store entries once they arrive; runs on the thread of copies."""
        for buffer, each in zip(self._buffers, leaving, strict=True):
            entries = self._read_pieces(each)
            for i, host_entry in enumerate(host_entries):
                buffer[host_entry] = entries[:, i]

    def read(self, host_entries: Sequence[int], count: int) -> list[np.ndarray]:
        """Return entries of each buffer, [layers, count, ...]; beyond the given ones, any."""
        self.wait_for(host_entries)
        self.allocate()
        wanted = np.zeros(count, np.int64)
        wanted[: len(host_entries)] = host_entries
        # Entries are the leading axis, so that one of a layer is contiguous.
        return [np.moveaxis(buffer[wanted], 0, 1) for buffer in self._buffers]

    def has_arrived(self, host_entry: int) -> bool:
        """Return whether no copy to an entry is pending, and the newest has not failed."""
        arriving = self._arriving.get(host_entry)
        return arriving is None or (arriving.done() and arriving.exception() is None)

    def read_bytes(self, host_entry: int) -> bytes:
        """Return the contents of an entry, which are arbitrary before the first copy."""
        self.wait_for((host_entry,))
        self.allocate()
        parts = (buffer[host_entry].reshape(-1).view(np.uint8) for buffer in self._buffers)
        return b"".join(parts)  # one copy of everything

    def write_bytes(self, host_entry: int, contents: bytes) -> None:
        """Store contents that `read_bytes` returned for buffers of the same layout."""
        arriving = self._arriving.pop(host_entry, None)
        if arriving is not None:
            wait((arriving,))  # it may have failed, but its contents are no longer needed
        self.allocate()
        start = 0
        for buffer in self._buffers:
            entry = buffer[host_entry]
            flat = np.frombuffer(contents, entry.dtype, entry.size, start)
            buffer[host_entry] = flat.reshape(entry.shape)
            start += entry.nbytes

    def wait_for(self, host_entries: Iterable[int]) -> None:
        for host_entry in host_entries:
            arriving = self._arriving.pop(host_entry, None)
            if arriving is not None:
                arriving.result()

    def wait_for_all(self) -> None:
        self.wait_for(list(self._arriving))

    def drop_leaving(self) -> None:
        """Drop entries in transit to the host, since failed steps may never deliver them."""
        wait(self._calls)
        self._arriving.clear()
        self._calls.clear()

    def delete(self) -> None:
        self._copier.shutdown(cancel_futures=True)
        self._arriving.clear()
        self._calls.clear()
        self._buffers.clear()


@final
@dataclass
class HostContents:
    """The `HostMemory` of entries that consist of the contents on each stage, in order."""

    hosts: Sequence[HostEntries]
    fingerprint: Callable[[], bytes]

    @property
    def entry_bytes(self) -> int:
        return sum(host.entry_bytes for host in self.hosts)

    def has_arrived(self, entry: int) -> bool:
        return all(host.has_arrived(entry) for host in self.hosts)

    def read(self, entry: int) -> bytes:
        return b"".join(host.read_bytes(entry) for host in self.hosts)

    def write(self, entry: int, contents: bytes) -> None:
        start = 0
        for host in self.hosts:
            host.write_bytes(entry, contents[start : start + host.entry_bytes])
            start += host.entry_bytes


@final
class DevicePages:
    """The page cache on the device, and the pages that were copied from it to the `host`.

    Every step donates `cache` and replaces it with its result.

    Args:
      max_leaving_bytes: see `HostEntries`; by default `transit_bytes`.
      max_incoming_bytes: maximum size of the pages in transit from the host, likewise.
      copy: returns pages of a buffer by their ids; by default `gathered`, jitted.
      read: see `HostEntries`; by default `to_host`.
    """

    def __init__(
        self,
        cache: KVCache,
        place: jax.sharding.Sharding,
        num_host_pages: int = 0,
        shelf: Shelf | None = None,
        *,
        max_leaving_bytes: int | None = None,
        max_incoming_bytes: int | None = None,
        copy: Callable[[jax.Array, np.ndarray], jax.Array] | None = None,
        read: Callable[[Sequence[jax.Array]], np.ndarray] = to_host,
    ):
        self.cache = cache
        self.place = place
        self._copy = copy or jax.jit(gathered, out_shardings=place)
        self._own = OwnShards(place)
        leaves = jax.tree.leaves(cache.pages)
        most = transit_bytes(sum(map(self._own.nbytes, leaves)))
        self._max_incoming_bytes = most if max_incoming_bytes is None else max_incoming_bytes
        self.host = HostEntries(
            leaves,
            [self._own] * len(leaves),
            num_host_pages,
            entries_a_call=PAGES_A_CALL,
            max_leaving_bytes=most if max_leaving_bytes is None else max_leaving_bytes,
            read=read,
        )
        self._staging = staging_place(place)
        shelf = shelf or unkept(place)
        self._gather = shelf.function("gathered", gathered)
        self._scatter = shelf.function(
            "scattered", scattered, donate_argnums=0, out_shardings=place
        )

    @property
    def num_buffers(self) -> int:
        """Size of the cache in units of its largest buffer; scales have separate buffers."""
        sizes = [leaf.nbytes for leaf in jax.tree.leaves(self.cache.pages)]
        return sum(sizes) // max(sizes, default=1)

    @property
    def num_pages(self) -> int:
        return self.cache.num_pages

    @property
    def shard_bytes(self) -> int:
        """Bytes of the cache on one device."""
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in self._leaves)

    @property
    def page_shape(self) -> tuple[Any, ...]:
        """Shape and dtype of a page in the first buffer, on which its contents depend."""
        leaf = self._leaves[0]
        return (leaf.shape[0], *leaf.shape[2:], str(leaf.dtype))

    @property
    def _leaves(self) -> list[Any]:
        return jax.tree.leaves(self.cache)

    @property
    def _page_leaves(self) -> list[Any]:
        return jax.tree.leaves(self.cache.pages)

    def replace(self, cache: KVCache) -> None:
        """Set the cache to the result of a function that may have donated the previous one."""
        self.cache = cache

    # ---- copies to the host and from it ----

    def preparations(self) -> list[tuple[str, Callable[[], Any]]]:
        if not self._page_leaves:
            return []
        cache, ids = abstract(self.cache.pages), np.zeros(PAGES_A_CALL, np.int32)
        pages = jax.tree.map(self._own.abstract, abstract_pages(cache, PAGES_A_CALL))
        return [
            ("pages to the host", partial(self._gather.prepare, cache, ids)),
            ("pages from the host", partial(self._scatter.prepare, cache, ids, pages)),
        ]

    def allocate_host(self) -> None:
        """Allocate the memory of the host pages now, once."""
        self.host.allocate()

    def swap(self, out: PageCopies, back: PageCopies) -> None:
        """Copy `out`, (device page, host page), to the host, then `back`, (host page, device page).

        Copies to the host finish in the background, unless `max_leaving_bytes` are on their way.
        Pages in transit from it take device memory twice, so at most `max_incoming_bytes` come at
        once.
        """
        if not self._page_leaves:
            return
        for some in chunks(out, PAGES_A_CALL):
            self.host.wait_for_room()
            ids = np.zeros(PAGES_A_CALL, np.int32)
            ids[: len(some)] = [page for page, _ in some]
            leaving = jax.tree.leaves(self._gather(self.cache.pages, ids))
            self.host.send(leaving, [host_page for _, host_page in some])
        num_bytes = 0
        for some in chunks(back, PAGES_A_CALL):
            ids = np.zeros(PAGES_A_CALL, np.int32)
            ids[: len(some)] = [page for _, page in some]
            pages = self.host.read([host_page for host_page, _ in some], PAGES_A_CALL)
            num_new_bytes = sum(each.nbytes for each in pages)
            if num_bytes and num_bytes + num_new_bytes > self._max_incoming_bytes:
                jax.block_until_ready(self.cache)
                num_bytes = 0
            values = self._own.to_devices(pages, like=self._page_leaves)
            moved = self._scatter(self.cache.pages, ids, self._in_cache(values))
            self.cache = replace(moved, states=self.cache.states)
            num_bytes += num_new_bytes

    def incoming(self, back: PageCopies, count: int) -> IncomingPages:
        """Return the contents of at most `count` (host page, device page), for a step to copy."""
        target = np.full(count, self.num_pages, np.int32)
        target[: len(back)] = [page for _, page in back]
        pages = self.host.read([host_page for host_page, _ in back], count)
        values = self._own.to_devices(pages, like=self._page_leaves, place=self._staging)
        return IncomingPages(target, self._in_cache(values))  # pyrefly: ignore[bad-argument-type]

    def abstract_incoming(self, count: int) -> IncomingPages | None:
        if not count:
            return None
        values = abstract_pages(self.cache.pages, count, sharding=self._staging)
        return IncomingPages(np.zeros(count, np.int32), values)  # pyrefly: ignore[bad-argument-type]

    def _in_cache(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(jax.tree.structure(self.cache.pages), leaves)

    # ---- the pool ----

    def resize(self, num_pages: int, moves: Moves) -> None:
        """Change the number of pages, as `Executor.resize` specifies.

        Buffers are copied and deleted one by one. At the peak the device holds the larger of the
        two caches and one buffer of the smaller: the keys of one layer if each layer has its own
        buffers, and half of the smaller cache if all layers share two.
        """
        self.host.wait_for_all()  # copies in flight hold device memory
        old_num_pages = self.num_pages
        try:
            self._bring_to(num_pages, moves)
        except Exception:
            self._bring_to(old_num_pages, [(new, old) for old, new in moves])
            raise

    def drop(self) -> None:
        """Free the memory on the device. `cache` has shapes only, until `replace`."""
        leaves = self._leaves
        self.cache = abstract(self.cache)
        for leaf in leaves:
            if isinstance(leaf, jax.Array):
                leaf.delete()

    def renew(self) -> None:
        """Replace the cache by zeros of the same shapes, after a step that may have donated it."""
        like = abstract(self.cache)
        for leaf in self._leaves:
            leaf.delete()
        self.cache = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), like
        )
        self.host.drop_leaving()

    def delete(self) -> None:
        self.host.delete()
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


# Repetitions of each timing.
_TIMINGS = 3


def measured_costs(
    swap: Callable[[], None],
    prefill: Callable[[], None],
    *,
    num_pages: int,
    num_tokens: int,
    position_work: float,
) -> Iterator[SwapCosts | None]:
    """Yield None after each timing, and at last the costs.

    Each time is the minimum of a few timings, since other work of the host only adds to them.
    `swap` copies `num_pages` pages to the host and back, and `prefill` computes `num_tokens` tokens
    of a prompt; both wait for the end. `position_work` is relative to a token's other work.
    """
    times = []
    for step in (swap, prefill):
        step()  # compiles
        yield None
        found = []
        for _ in range(_TIMINGS):
            begin_s = time.perf_counter()
            step()
            found.append(time.perf_counter() - begin_s)
            yield None
        times.append(min(found))
    token_s = times[1] / num_tokens
    yield SwapCosts(
        page_s=times[0] / 2 / num_pages, token_s=token_s, position_s=token_s * position_work
    )


def work_of_a_position(models: Sequence[DecoderConfig], params: Any) -> float:
    """Return the FLOPs of attending to one position, relative to a token's other FLOPs.

    `params` are the whole model's, or their shapes; with stages, `models` has a part for each.
    """
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    width = sum(each.num_attention_layers * each.num_heads * each.head_dim for each in models)
    return 2 * width / num_params


@final
class SwapCostMeter:
    """The swap costs of an executor: from an earlier start, or measured in short pieces.

    They are stored on `shelf`, under its device and executables and `settings`. `timings` begins a
    measurement (`measured_costs`). `costs` is None until they are measured.
    """

    def __init__(
        self,
        shelf: Shelf,
        settings: Sequence[Any],
        timings: Callable[[], Iterator[SwapCosts | None]],
        *,
        has_host_pages: bool,
    ):
        self._shelf = shelf
        self._key = shelf.key("swap costs", *settings)
        kept = shelf.read(self._key)
        self.costs: SwapCosts | None = None if kept is None else SwapCosts(**json.loads(kept))
        self._timings = timings
        self._has_host_pages = has_host_pages
        self._running: Iterator[SwapCosts | None] | None = None

    @property
    def is_missing(self) -> bool:
        """Whether there are host pages, and no costs yet."""
        return self._has_host_pages and self.costs is None

    def measure_on(self) -> None:
        """Do the next timing, and keep the costs after the last. An error ends the measurement."""
        self._running = self._running or self._timings()
        try:
            self.costs = next(self._running)
        except BaseException:
            self._has_host_pages, self._running = False, None
            raise
        if self.costs is not None:
            self._shelf.write(self._key, json.dumps(asdict(self.costs)).encode())

    def measure(self) -> None:
        while self.is_missing:
            self.measure_on()

    def restart(self) -> None:
        """Drop the timings of a measurement that has not ended."""
        self._running = None
