"""Transport of KV pages between the page caches of two device groups.

`LocalTransport` copies pages between the devices of one process. Where the groups belong to
different processes, `PullTransport` uses JAX's own transfer: every device of the target group pulls
its part of the pages from a process of the source group, while both groups compute. If processes
cannot reach each other that way, `HostTransport` sends the pages through host memory and the
leader.
"""

from __future__ import annotations

import abc
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate
from math import gcd
from typing import Any, Protocol, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import transfer

from jaxserve.execution.device import DeviceExecutor
from jaxserve.execution.pages import PAGES_A_CALL, DevicePages, chunks, gathered, scattered
from jaxserve.memory.page_pool import NULL_PAGE
from jaxserve.models.batch import KVCache
from jaxserve.scheduling.plan import StepPlan, StepResult, nothing_computed
from jaxserve.sharding import ProcessGroup
from jaxserve.steps.step_function import Placement, StepFunction, abstract, unkept

_log = logging.getLogger(__name__)

# The processes of the encode group, and those of the decode group; no process is in both.
Processes = tuple[tuple[int, ...], tuple[int, ...]]

# The arrays of some layers: keys, values and, where there are scales, those of each:
# [layers, PAGES_A_CALL, kv_heads, ...].
Arrays = tuple[jax.Array, ...]

# The result of a handover: pages with their contents; none, if the target's devices have them; or a
# str, the reason for which they are lost.
Outcome = tuple[Any, ...] | str

# An array that processes pull from each other at the start.
_TRIAL = np.arange(16, dtype=np.int32)
_POLL_S = 0.01


# ---- copies out of a cache and into it ----


def gather_parts(
    cache: KVCache,
    ids: jax.Array,  # int32 [PAGES_A_CALL]
    *,
    pieces: Sequence[tuple[range, int, int]],
) -> list[list[list[jax.Array]]]:
    """Return, for each piece and kind of array, the parts of the pages.

    A piece is layers, KV heads of the target's cache, and the number of parts to cut them into.
    """
    pages = gathered(cache, ids)
    joined = [jnp.concatenate(leaves) for leaves in _kinds(pages)]
    return [
        [
            jnp.split(_with_heads(leaf[layers.start : layers.stop], num_heads), num_parts, axis=2)
            for leaf in joined
        ]
        for layers, num_heads, num_parts in pieces
    ]


def scatter_pieces(
    cache: KVCache,
    ids: jax.Array,  # int32 [PAGES_A_CALL]; an id past the end is skipped
    pieces: Sequence[Arrays],
) -> KVCache:
    """Return `cache` with the pages of the joined pieces written to it."""
    joined = [jnp.concatenate(leaves) for leaves in zip(*pieces, strict=True)]
    values = []
    for leaves, whole in zip(_kinds(cache), joined, strict=True):
        ends = accumulate(leaf.shape[0] for leaf in leaves)
        values += [whole[end - leaf.shape[0] : end] for leaf, end in zip(leaves, ends, strict=True)]
    return scattered(cache, ids, jax.tree.unflatten(jax.tree.structure(cache), values))


def _kinds(cache: KVCache) -> list[tuple[jax.Array, ...]]:
    """Return the buffers of each kind of array that a cache has, in the order of its leaves."""
    return [leaves for field in fields(cache) if (leaves := getattr(cache, field.name))]


def _with_heads(pages: jax.Array, num_heads: int) -> jax.Array:
    """Return pages [layers, pages, heads, ...] with fewer or more copies of each KV head."""
    common = gcd(pages.shape[2], num_heads)
    return jnp.repeat(pages[:, :, :: pages.shape[2] // common], num_heads // common, axis=2)


def _own_parts(place: jax.sharding.Sharding, num_parts: int) -> Iterator[tuple[Any, int]]:
    """Yield each device of a placement that belongs to this process, and the index of its part."""
    shape = (1, 1, num_parts)
    for device, index in place.addressable_devices_indices_map(shape).items():
        assert index is not None
        yield device, index[2].start or 0


def _copy_of_part(part: jax.Array, index: int) -> jax.Array:
    """Return the array of one device that holds the part with this index."""
    copies = part.addressable_shards
    return copies[index % len(copies)].data


def _joined(parts: Sequence[jax.Array], place: jax.sharding.Sharding, num_parts: int) -> jax.Array:
    """Return the array that is cut by KV head into `num_parts`, from that of each own device."""
    layers, pages, heads, *rest = parts[0].shape
    shape = (layers, pages, heads * num_parts, *rest)
    return jax.make_array_from_single_device_arrays(shape, place, list(parts))


@final
@dataclass(frozen=True)
class CacheCut:
    """The part of a group's KV in one of its caches: layers, KV heads with copies, and shards."""

    layers: range
    num_heads: int
    num_shards: int


def cuts_of(pools: Sequence[DevicePages]) -> list[CacheCut]:
    """Return the cut of each cache of a group, in the order of their layers."""
    counts = [sum(leaf.shape[0] for leaf in pool.cache.k_pages) for pool in pools]
    return [
        CacheCut(
            range(end - count, end),
            pool.cache.k_pages[0].shape[2],
            Placement.like(pool.place).num_shards,
        )
        for pool, count, end in zip(pools, counts, accumulate(counts), strict=True)
    ]


@final
@dataclass(frozen=True)
class _Piece:
    """The layers, by index in a cache, that it shares with the cache `other` of the other group.

    If `keeps_shards`, both caches have equal shards, and each moves as a whole.
    """

    other: int
    layers: range
    num_heads: int
    num_parts: int
    keeps_shards: bool


def _pieces(own: CacheCut, others: Sequence[CacheCut], *, moves_shards: bool) -> list[_Piece]:
    pieces = []
    for index, other in enumerate(others):
        first = max(own.layers.start, other.layers.start) - own.layers.start
        last = min(own.layers.stop, other.layers.stop) - own.layers.start
        if first < last:
            keeps = moves_shards and own.num_shards == other.num_shards
            num_parts = 1 if keeps else other.num_shards
            pieces.append(_Piece(index, range(first, last), other.num_heads, num_parts, keeps))
    return pieces


@final
class PagePort:
    """Copies of pages out of the caches of one device group and into them.

    Every process of the group makes the same calls in the same order, between steps. A page has the
    same number in every cache of both groups. `others` are the caches of the other group, which
    have the same layers and formats, but may be cut differently into stages and shards. Copies have
    a fixed number of pages, so that nothing compiles after a first copy in each direction.

    Args:
      moves_shards: whether caches with equal shards exchange shards, which only devices of one
        process can. Otherwise every device of the source gathers all KV heads.
    """

    def __init__(
        self,
        pools: Sequence[DevicePages],
        others: Sequence[CacheCut],
        *,
        moves_shards: bool = False,
    ):
        self.pools = tuple(pools)
        self.pieces = [_pieces(own, others, moves_shards=moves_shards) for own in cuts_of(pools)]
        self._take, self._put = [], []
        for pool, pieces in zip(self.pools, self.pieces, strict=True):
            place = Placement.like(pool.place)
            gather = partial(
                gather_parts,
                pieces=tuple((each.layers, each.num_heads, each.num_parts) for each in pieces),
            )
            to = [place.pages if each.keeps_shards else place.whole for each in pieces]
            copy = partial(StepFunction, shelf=unkept(pool.place), num_fixed=0)
            self._take.append(copy("taken", gather, out_shardings=to))
            self._put.append(
                copy("put", scatter_pieces, donate_argnums=0, out_shardings=pool.place)
            )

    def take(self, pages: Sequence[int]) -> list[tuple[Sequence[int], list[Any]]]:
        """Start to gather pages into separate buffers; the caller may donate the caches afterwards.

        Return at most `PAGES_A_CALL` pages at a time, with the parts of each kind of array of each
        piece of each cache.
        """
        return [(some, self._gathered(some)) for some in chunks(pages, PAGES_A_CALL)]

    def put(
        self,
        pages: Sequence[int],
        contents: Sequence[Sequence[Arrays]],
        dropped: Collection[int] = (),
    ) -> None:
        """Write at most `PAGES_A_CALL` pages to the caches, for all later steps.

        `contents` are the arrays of each piece of each cache. Pages in `dropped` stay as they are.
        """
        for pool, put, pieces in zip(self.pools, self._put, contents, strict=True):
            ids = np.full(PAGES_A_CALL, pool.num_pages, np.int32)  # past the end: skipped
            for i, page in enumerate(pages):
                if page not in dropped:
                    ids[i] = page
            pool.replace(put(pool.cache, ids, tuple(pieces)))

    def prepare(self) -> None:
        """Compile every copy without running it. The caches may have shapes only."""
        ids = np.zeros(PAGES_A_CALL, np.int32)
        functions = zip(self.pools, self._take, self._put, self.pieces, strict=True)
        for pool, take, put, pieces in functions:
            cache = abstract(pool.cache)
            take.prepare(cache, ids)
            shapes = (_shapes(cache, len(each.layers), sharding=pool.place) for each in pieces)
            put.prepare(cache, ids, tuple(shapes))

    def _gathered(self, pages: Sequence[int]) -> list[Any]:
        ids = np.full(PAGES_A_CALL, NULL_PAGE, np.int32)
        ids[: len(pages)] = pages
        return [take(each.cache, ids) for each, take in zip(self.pools, self._take, strict=True)]


def _shapes(cache: KVCache, num_layers: int, num_parts: int = 1, **placed: Any) -> tuple[Any, ...]:
    """Return the shapes of the arrays of pages of a full call, or of one of their parts."""
    shapes = []
    for leaf, *_ in _kinds(cache):
        heads, *rest = leaf.shape[2:]
        shape = (num_layers, PAGES_A_CALL, heads // num_parts, *rest)
        shapes.append(jax.ShapeDtypeStruct(shape, leaf.dtype, **placed))
    return tuple(shapes)


# ---- transfers ----


@final
@dataclass(frozen=True)
class Arrived:
    """The end of a handover: its pages are to be written before the next plan.

    `number` plans precede the handover. Pages in `dropped`, each with its device group, must not be
    written, since they belong to another sequence now.
    """

    number: int
    outcome: Outcome
    dropped: frozenset[tuple[int, int]]

    def dropped_in(self, group: int) -> set[int]:
        return {page for own, page in self.dropped if own == group}


class Awaited(Protocol):
    """Something in progress, here or in another process."""

    def is_ready(self) -> bool: ...

    def collect(self) -> Any:
        """Wait for the result: an `Outcome`, if it is a handover."""
        ...


@final
class InTransit:
    """Arrays that devices copy. `collect` returns what `finish` returns when they have arrived."""

    def __init__(self, arrays: Any, finish: Callable[[], Outcome] = tuple):
        self._leaves: list[Any] = jax.tree.leaves(arrays)
        self._finish = finish

    def is_ready(self) -> bool:
        return all(leaf.is_ready() for leaf in self._leaves)

    def collect(self) -> Outcome:
        try:
            jax.block_until_ready(self._leaves)
            return self._finish()
        except jax.errors.JaxRuntimeError as error:
            return str(error)


@final
class Transfer:
    """The pages of a plan's handovers on their way: a submitted plan of the link.

    `collect` has them written to the target's cache once they have arrived, so that the target's
    steps do not wait for them. If the source's devices or the transfer have failed, the target's
    cache stays unchanged, and the result reports the loss. It calls `receive` once.
    """

    def __init__(
        self,
        plan: StepPlan,
        number: int,
        awaited: Awaited,
        receive: Callable[[Transfer, Arrived], None],
    ):
        self.plan = plan
        self.dropped: set[tuple[int, int]] = set()
        self._number = number
        self._awaited = awaited
        self._receive = receive

    def is_ready(self) -> bool:
        return self._awaited.is_ready()

    def collect(self) -> StepResult:
        outcome = self._awaited.collect()
        self._receive(self, Arrived(self._number, outcome, frozenset(self.dropped)))
        if not isinstance(outcome, str):
            return nothing_computed()
        num_lost = len(self.plan.handovers)
        _log.warning("the KV of %d sequences was lost: %s", num_lost, outcome)
        return nothing_computed(np.zeros(num_lost, np.bool_))


class KVTransport(abc.ABC):
    """Moves KV pages between the caches of two device groups, on the side of one process.

    Every process gets the same handovers in the same order, and calls `send` for each. The process
    that schedules tracks them, and decides when pages have arrived and which of them are still
    needed; then each process of the target group calls `write`.
    """

    def __init__(self) -> None:
        self._pending: list[Transfer] = []

    @abc.abstractmethod
    def warm_up(self) -> None:
        """Run every copy once; no page changes."""

    @abc.abstractmethod
    def send(self, plan: StepPlan, number: int) -> Awaited | None:
        """Start a plan's handovers; return what this process must wait for, or None.

        `number` plans precede it. The outcome of the first process of a group counts.
        """

    @abc.abstractmethod
    def write(self, arrived: Arrived) -> None:
        """Write pages to the target's caches, for all of their later steps."""

    def track(
        self,
        plan: StepPlan,
        number: int,
        awaited: Awaited,
        receive: Callable[[StepPlan, Arrived], None],
    ) -> Transfer:
        """Return the handle of handovers that were sent; its `collect` calls `receive`."""

        def end(own: Transfer, arrived: Arrived) -> None:
            self._pending.remove(own)
            receive(plan, arrived)

        self._pending.append(Transfer(plan, number, awaited, end))
        return self._pending[-1]

    def keep_off(self, plan: StepPlan) -> None:
        """Write no page on its way that this plan gives to a sequence of its group.

        The sequence may be computed before the copies of the page's former owner arrive.
        """
        taken = {(plan.group, page) for _, _, page in plan.page_updates}
        for each in self._pending:
            each.dropped |= taken

    @property
    def is_idle(self) -> bool:
        """Whether no pages are on their way."""
        return not self._pending

    def drop_pending(self) -> None:
        """Lose the pages on their way; their handles must not be collected."""
        self._pending.clear()


def _pages_by_way(plan: StepPlan) -> dict[tuple[int, int], list[int]]:
    """Return the pages to copy by source and target; pages that sequences share count once."""
    found: dict[tuple[int, int], dict[int, None]] = {}
    for each in plan.handovers:
        found.setdefault((each.source, each.target), {}).update(dict.fromkeys(each.pages))
    return {way: list(pages) for way, pages in found.items()}


@final
class LocalTransport(KVTransport):
    """Copies pages between two groups of this process's devices; each may have stages."""

    def __init__(self, encode: Sequence[DevicePages], decode: Sequence[DevicePages]):
        super().__init__()
        pools = encode, decode
        self._ports = [
            PagePort(own, cuts_of(other), moves_shards=True)
            for own, other in zip(pools, reversed(pools), strict=True)
        ]

    def warm_up(self) -> None:
        for target, source in enumerate(reversed(self._ports)):
            [(_, taken)] = source.take((NULL_PAGE,))
            self._ports[target].put((), self._moved(source, self._ports[target], taken))

    def prepare(self) -> None:
        """Compile every copy without running it. The caches may have shapes only."""
        for port in self._ports:
            port.prepare()

    def send(self, plan: StepPlan, number: int) -> InTransit:
        sent = tuple(
            (target, some, self._moved(self._ports[source], self._ports[target], taken))
            for (source, target), pages in _pages_by_way(plan).items()
            for some, taken in self._ports[source].take(pages)
        )
        return InTransit([contents for *_, contents in sent], lambda: sent)

    def write(self, arrived: Arrived) -> None:
        if not isinstance(arrived.outcome, str):
            for target, pages, contents in arrived.outcome:
                self._ports[target].put(pages, contents, arrived.dropped_in(target))

    def _moved(
        self, source: PagePort, target: PagePort, taken: Sequence[Any]
    ) -> list[list[Arrays]]:
        """Move pages to the target's devices; each gets only its own heads, directly."""
        moved: list[list[Arrays]] = [[] for _ in target.pools]
        for pieces, contents in zip(source.pieces, taken, strict=True):
            for piece, kinds in zip(pieces, contents, strict=True):
                place = target.pools[piece.other].place
                if piece.keeps_shards:
                    arrays = jax.device_put([parts[0] for parts in kinds], place)
                else:
                    arrays = [_sharded(parts, place) for parts in kinds]
                moved[piece.other].append(tuple(arrays))
        return moved


def _sharded(parts: Sequence[jax.Array], place: jax.sharding.Sharding) -> jax.Array:
    """Return an array whose shards on axis 2 are `parts`; each source has a copy of them."""
    own = list(_own_parts(place, len(parts)))
    shards = [_copy_of_part(parts[index], index) for _, index in own]
    return _joined(jax.device_put(shards, [device for device, _ in own]), place, len(parts))


# ---- between processes ----


class ProcessTransport(KVTransport):
    """A transport between groups of different processes; `pool` is the cache of the own group.

    `own_index` is that of this process's group, and `other` the cut of the other group's cache.
    """

    def __init__(self, own_index: int, pool: DevicePages, other: CacheCut):
        super().__init__()
        self._own_index = own_index
        self._pool = pool
        self._port = PagePort((pool,), (other,))
        self._cut = cuts_of((pool,))[0]
        # This process's devices of the group, and the index of the part that each has.
        self._devices = list(_own_parts(pool.place, self._cut.num_shards))

    def warm_up(self) -> None:
        self._port.take((NULL_PAGE,))
        zeros = [np.zeros(shape.shape, shape.dtype) for shape in self._part_shapes()]
        self._put((), [jax.device_put(zeros, device) for device, _ in self._devices])

    def send(self, plan: StepPlan, number: int) -> Awaited | None:
        ways = _pages_by_way(plan)
        if len(ways) > 1:
            raise NotImplementedError(
                "a plan that hands KV over in both directions, between groups in several processes"
            )
        [((source, target), pages)] = ways.items()
        if self._own_index == source:
            return self._give([(some, taken[0][0]) for some, taken in self._port.take(pages)])
        assert self._own_index == target
        return self._get(number, pages)

    @abc.abstractmethod
    def _give(self, taken: Sequence[tuple[Sequence[int], Any]]) -> Awaited | None:
        """Offer pages, each call of them with the parts of each kind of array."""

    @abc.abstractmethod
    def _get(self, number: int, pages: Sequence[int]) -> Awaited | None: ...

    def _put(
        self,
        pages: Sequence[int],
        parts: Sequence[Sequence[jax.Array]],
        arrived: Arrived | None = None,
    ) -> None:
        """Write pages, of which `parts` are those of every kind of array on each own device."""
        arrays = (
            _joined(each, self._pool.place, self._cut.num_shards)
            for each in zip(*parts, strict=True)
        )
        dropped = () if arrived is None else arrived.dropped_in(self._own_index)
        self._port.put(pages, [[tuple(arrays)]], dropped)

    def _part_shapes(self) -> tuple[Any, ...]:
        return _shapes(self._pool.cache, len(self._cut.layers), self._cut.num_shards)


@final
class HostTransport(ProcessTransport):
    """Sends pages through host memory and the leader."""

    def _give(self, taken: Sequence[tuple[Sequence[int], Any]]) -> Awaited:
        arrays = [kinds for _, kinds in taken]
        for leaf in jax.tree.leaves(arrays):
            leaf.copy_to_host_async()

        def on_host() -> Outcome:
            return tuple(
                (pages, [list(map(np.asarray, part)) for part in zip(*kinds, strict=True)])
                for pages, kinds in taken
            )

        return InTransit(arrays, on_host)

    def _get(self, number: int, pages: Sequence[int]) -> None:
        return None

    def write(self, arrived: Arrived) -> None:
        if isinstance(arrived.outcome, str):
            return
        for pages, parts in arrived.outcome:
            own = [jax.device_put(parts[index], device) for device, index in self._devices]
            self._put(pages, own, arrived)


@final
@dataclass(frozen=True)
class _Peer:
    """The record that a process sends to the other processes at the start.

    `address` is its transfer server's, None without one; its transfers have keys from the random
    `key` on; `parts` has the index of the part of each of its devices.
    """

    address: str | None
    key: int
    cut: CacheCut
    parts: tuple[int, ...]


@final
class PullTransport(ProcessTransport):
    """Pulls pages from a process of the source onto the target's devices, with JAX's transfer."""

    def __init__(
        self,
        own_index: int,
        pool: DevicePages,
        server: transfer.TransferServer,
        peers: Sequence[_Peer],
        process_id: int,
        processes: Processes,
    ):
        own, others = processes[own_index], processes[1 - own_index]
        super().__init__(own_index, pool, peers[others[0]].cut)
        self._server = server
        address = peers[others[0]].address
        assert address is not None
        self._connection = server.connect(address)
        self._gives = process_id == own[0]
        # The number of a process's first transfer within a call; processes are numbered in order.
        self._num_before = {
            each: sum(len(peers[other].parts) for other in group[: group.index(each)])
            for group in processes
            for each in group
        }
        self._process_id = process_id
        self._others = {each: peers[each].parts for each in others}
        self._stride = sum(len(peer.parts) for peer in peers)
        self._first_key = self._next_key = peers[0].key
        # The pages and the pulled parts (one entry per call) of each handover, by its number.
        self._pulled: dict[int, list[tuple[Sequence[int], list[list[jax.Array]]]]] = {}

    def try_out(self, patience_s: float) -> str:
        """Pull an array from the other group; return the reason if that fails. All call it."""
        if self._gives:
            for each in self._others:
                self._server.await_pull(self._first_key - 1 - each, [jax.device_put(_TRIAL)])
        place = jax.sharding.SingleDeviceSharding(self._devices[0][0])
        shape = jax.ShapeDtypeStruct(_TRIAL.shape, _TRIAL.dtype, sharding=place)
        (pulled,) = self._connection.pull(self._first_key - 1 - self._process_id, [shape])
        until_s = time.monotonic() + patience_s
        while not pulled.is_ready():
            if time.monotonic() > until_s:
                return f"process {self._process_id} got nothing within {patience_s:g} s"
            time.sleep(_POLL_S)
        try:
            got = np.asarray(pulled)
        except jax.errors.JaxRuntimeError as error:
            return f"process {self._process_id}: {error}"
        return "" if np.array_equal(got, _TRIAL) else f"process {self._process_id} got {got}"

    def _give(self, taken: Sequence[tuple[Sequence[int], Any]]) -> None:
        for _, kinds in taken:
            first = self._key()
            if not self._gives:
                continue
            for process_id, parts in self._others.items():
                for i, part in enumerate(parts, self._num_before[process_id]):
                    offered = [_copy_of_part(each[part], part) for each in kinds]
                    self._server.await_pull(first + i, offered)

    def _get(self, number: int, pages: Sequence[int]) -> Awaited:
        calls = []
        for some in chunks(pages, PAGES_A_CALL):
            first = self._key() + self._num_before[self._process_id]
            parts = [
                self._connection.pull(first + i, self._shapes_on(device))
                for i, (device, _) in enumerate(self._devices)
            ]
            calls.append((some, parts))
        self._pulled[number] = calls
        return InTransit([parts for _, parts in calls])

    def write(self, arrived: Arrived) -> None:
        calls = self._pulled.pop(arrived.number)
        if not isinstance(arrived.outcome, str):
            for pages, parts in calls:
                self._put(pages, parts, arrived)

    def _key(self) -> int:
        """Return the key of the first transfer of the next call."""
        self._next_key += self._stride
        return self._next_key - self._stride

    def _shapes_on(self, device: Any) -> list[jax.ShapeDtypeStruct]:
        place = jax.sharding.SingleDeviceSharding(device)
        return [shape.update(sharding=place) for shape in self._part_shapes()]


def make_transport(
    executor: DeviceExecutor,
    group: ProcessGroup,
    processes: Processes,
    *,
    serve: Callable[..., transfer.TransferServer] = transfer.start_transfer_server,
    patience_s: float = 10.0,
) -> KVTransport:
    """Return a `PullTransport`, or a `HostTransport` if a process cannot pull from the other group.

    All processes of a job call it at the same time and try for `patience_s` to reach each other.
    The leader logs the reason for a `HostTransport`.
    """
    own_index = 0 if group.process_id in processes[0] else 1
    pool = executor.pages
    [cut] = cuts_of((pool,))
    server, reason, address = None, "", f"{group.address}:0"
    try:
        server = serve(executor.device.client, address, [address])
    except jax.errors.JaxRuntimeError as error:
        reason = f"no server at {address} ({error})"
    peers: list[_Peer] = group.all_gather(
        _Peer(
            address=None if server is None else server.address(),
            # Any program that reaches a server could pull what it offers, if it guessed the key.
            key=secrets.randbits(61),
            cut=cut,
            parts=tuple(index for _, index in _own_parts(pool.place, cut.num_shards)),
        )
    )
    pulls = None
    if server is not None and all(peer.address is not None for peer in peers):
        pulls = PullTransport(own_index, pool, server, peers, group.process_id, processes)
        reason = pulls.try_out(patience_s)
    reasons = group.all_gather(reason)
    if pulls is not None and not any(reasons):
        return pulls
    if group.is_leader:
        _log.warning(
            "KV passes through the host and process 0 from one device group to the other, as JAX "
            "cannot transfer arrays between these processes: %s",
            next(filter(None, reasons)),
        )
    return HostTransport(own_index, pool, peers[processes[1 - own_index][0]].cut)
