"""Transfer of KV pages between two device groups that belong to different processes.

`TransferCourier` uses JAX's own transfer: every device of the target group pulls its part of the
pages from a process of the source group, while both groups compute. If processes cannot reach each
other that way, `HostCourier` sends the pages through host memory and the leader.
"""

from __future__ import annotations

import abc
import logging
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final

import jax
import numpy as np
from jax.experimental import transfer

from jaxserve.execution.device import DeviceExecutor
from jaxserve.execution.link import (
    copy_of_part,
    gather_parts,
    joined_shape,
    kinds,
    own_parts,
    scatter_pieces,
)
from jaxserve.execution.pages import PAGES_A_CALL, DevicePages
from jaxserve.memory.page_pool import NULL_PAGE
from jaxserve.scheduling.plan import StepPlan
from jaxserve.steps.step_function import Placement, StepFunction, unkept
from sharding import ProcessGroup

_log = logging.getLogger(__name__)

# The processes of the encode group, and those of the decode group; no process is in both.
Processes = tuple[tuple[int, ...], tuple[int, ...]]

# Pages, and the arrays of each part of them, in host memory.
_PagesOnHost = tuple[tuple[int, ...], list[list[np.ndarray]]]

# The result of a handover: pages in transit through the leader; none, if the target's devices have
# them; or a str, the reason for which they are lost.
Outcome = tuple[_PagesOnHost, ...] | str

# An array that processes pull from each other at the start.
_TRIAL = np.arange(16, dtype=np.int32)
_POLL_S = 0.01


@final
@dataclass(frozen=True)
class Cut:
    """The split of a group's cache by KV head: heads, repeated ones included, and shards."""

    num_heads: int
    num_parts: int


@final
class TakenPages:
    """At most `PAGES_A_CALL` gathered pages: for each kind of array, the target group's parts."""

    def __init__(self, pages: Sequence[int], parts: Sequence[Sequence[jax.Array]]):
        self.pages = tuple(pages)
        self._kinds = parts

    def is_ready(self) -> bool:
        leaves: list[Any] = jax.tree.leaves(self._kinds)
        return all(leaf.is_ready() for leaf in leaves)

    def part(self, index: int) -> list[jax.Array]:
        """Return a part: for each kind of array, an array on one device."""
        return [copy_of_part(parts[index], index) for parts in self._kinds]

    def start_to_host(self) -> None:
        for leaf in jax.tree.leaves(self._kinds):
            leaf.copy_to_host_async()

    def on_host(self) -> list[list[np.ndarray]]:
        """Wait for the pages; return the arrays of each part, or raise JAX's JaxRuntimeError."""
        return [list(map(np.asarray, part)) for part in zip(*self._kinds, strict=True)]


@final
class PagePort:
    """Copies of pages out of the cache of a device group and into it.

    Every process of the group makes the same calls in the same order, between steps. The caches at
    both ends have the same layers and formats; they may be split differently by KV head. Copies
    have a fixed number of pages, so that nothing compiles after `warm_up`.

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
            "taken",
            partial(gather_parts, pieces=pieces),
            unkept(pool.place),
            num_fixed=0,
            out_shardings=place.whole,
        )
        self._put = StepFunction(
            "put",
            scatter_pieces,
            unkept(pool.place),
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
        """Write at most `PAGES_A_CALL` pages to the cache, for all later steps.

        For each of `devices`, `parts` has its part of every kind of array, on that device. Pages in
        `dropped` keep their contents.
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
    return Cut(pool.cache.k_pages[0].shape[2], Placement.like(pool.place).num_shards)


@final
@dataclass(frozen=True)
class Arrived:
    """A message of the leader: write the pages of a handover before the next plan.

    `number` plans precede the handover. Pages in `dropped` must not be written.
    """

    number: int
    outcome: Outcome
    dropped: frozenset[int]


class Awaited(Protocol):
    """A handover in progress."""

    def is_ready(self) -> bool: ...

    def collect(self) -> Outcome:
        """Wait for the result of the handover."""
        ...


class Courier(abc.ABC):
    """Transfers KV pages between two device groups, on the side of one process.

    Every process gets the same handovers in the same order, and makes the same calls. `port` reads
    and writes the cache of this process's group, `own_index`.
    """

    def __init__(self, own_index: int, port: PagePort):
        self._own_index = own_index
        self._port = port

    def warm_up(self) -> None:
        self._port.warm_up()

    def begin(self, plan: StepPlan, number: int) -> Awaited | None:
        """Start a handover; return what this process must wait for, or None.

        The outcome of the first process of a group counts.
        """
        source, target = _way(plan)
        pages = list(dict.fromkeys(page for each in plan.handovers for page in each.pages))
        if self._own_index == source:
            return self._give(self._port.take(pages), number, pages)
        assert self._own_index == target
        return self._get(number, pages)

    @abc.abstractmethod
    def _give(
        self, taken: list[TakenPages], number: int, pages: Sequence[int]
    ) -> Awaited | None: ...

    @abc.abstractmethod
    def _get(self, number: int, pages: Sequence[int]) -> Awaited | None: ...

    @abc.abstractmethod
    def write(self, arrived: Arrived) -> None:
        """Write pages to the cache of this process's group, for all of its later steps."""


@final
class HostCourier(Courier):
    """Sends pages through host memory and the leader."""

    def _give(self, taken: list[TakenPages], number: int, pages: Sequence[int]) -> Awaited:
        return _ToHost(taken)

    def _get(self, number: int, pages: Sequence[int]) -> None:
        return None

    def write(self, arrived: Arrived) -> None:
        if isinstance(arrived.outcome, str):
            return
        for pages, parts in arrived.outcome:
            devices = self._port.devices
            on_devices = [jax.device_put(parts[index], device) for device, index in devices]
            self._port.put(pages, on_devices, arrived.dropped)


@final
@dataclass(frozen=True)
class _Peer:
    """The record that a process sends to the other processes at the start.

    `address` is its transfer server's, None without one; its transfers have keys from the random
    `key` on; `parts` has the index of the part of each of its devices.
    """

    address: str | None
    key: int
    cut: Cut
    parts: tuple[int, ...]


@final
class TransferCourier(Courier):
    """Pulls pages from a process of the source onto the target's devices, with JAX's transfer."""

    def __init__(
        self,
        own_index: int,
        port: PagePort,
        server: transfer.TransferServer,
        peers: Sequence[_Peer],
        process_id: int,
        processes: Processes,
    ):
        super().__init__(own_index, port)
        self._server = server
        address = peers[processes[1 - own_index][0]].address
        assert address is not None
        self._connection = server.connect(address)
        self._gives = process_id == processes[own_index][0]
        # The number of a process's first transfer within a call; processes are numbered in order.
        self._num_before = {
            each: sum(len(peers[other].parts) for other in group[: group.index(each)])
            for group in processes
            for each in group
        }
        self._process_id = process_id
        self._others = {each: peers[each].parts for each in processes[1 - own_index]}
        self._stride = sum(len(peer.parts) for peer in peers)
        self._first_key = self._next_key = peers[0].key
        # The pages and the pulled parts (one entry per call) of each handover, by its number.
        self._pulled: dict[int, tuple[Sequence[int], list[list[list[jax.Array]]]]] = {}

    def try_out(self, patience_s: float) -> str:
        """Pull an array from the other group; return the reason if that fails. All call it."""
        if self._gives:
            for each in self._others:
                self._server.await_pull(self._first_key - 1 - each, [jax.device_put(_TRIAL)])
        device = self._port.devices[0][0]
        place = jax.sharding.SingleDeviceSharding(device)
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

    def _give(self, taken: list[TakenPages], number: int, pages: Sequence[int]) -> None:
        for call in taken:
            first = self._key()
            if not self._gives:
                continue
            for process_id, parts in self._others.items():
                for i, part in enumerate(parts, self._num_before[process_id]):
                    self._server.await_pull(first + i, call.part(part))

    def _get(self, number: int, pages: Sequence[int]) -> Awaited:
        calls = []
        for _ in range(0, len(pages), PAGES_A_CALL):
            first = self._key() + self._num_before[self._process_id]
            calls.append(
                [
                    self._connection.pull(first + i, self._shapes_on(device))
                    for i, (device, _) in enumerate(self._port.devices)
                ]
            )
        self._pulled[number] = pages, calls
        return _Pulled(calls)

    def write(self, arrived: Arrived) -> None:
        pages, calls = self._pulled.pop(arrived.number)
        if isinstance(arrived.outcome, str):
            return
        for call, parts in enumerate(calls):
            start = call * PAGES_A_CALL
            self._port.put(pages[start : start + PAGES_A_CALL], parts, arrived.dropped)

    def _key(self) -> int:
        """Return the key of the first transfer of the next call."""
        self._next_key += self._stride
        return self._next_key - self._stride

    def _shapes_on(self, device: Any) -> list[jax.ShapeDtypeStruct]:
        place = jax.sharding.SingleDeviceSharding(device)
        return [shape.update(sharding=place) for shape in self._port.shapes()]


def make_courier(
    executor: DeviceExecutor,
    group: ProcessGroup,
    processes: Processes,
    *,
    serve: Callable[..., transfer.TransferServer] = transfer.start_transfer_server,
    patience_s: float = 10.0,
) -> Courier:
    """Return a `TransferCourier`, or a `HostCourier` if a process cannot pull from the other group.

    All processes of a job call it at the same time and try for `patience_s` to reach each other.
    The leader logs the reason for a `HostCourier`.
    """
    own_index = 0 if group.process_id in processes[0] else 1
    pool = executor.pages
    cut = cut_of(pool)
    server, reason = _server(group, executor, serve)
    peers: list[_Peer] = group.all_gather(
        _Peer(
            address=None if server is None else server.address(),
            # Any program that reaches a server could pull what it offers, if it guessed the key.
            key=secrets.randbits(61),
            cut=cut,
            parts=tuple(index for _, index in own_parts(pool.place, cut.num_parts)),
        )
    )
    port = PagePort(pool, peers[processes[1 - own_index][0]].cut)
    courier = None
    if server is not None and all(peer.address is not None for peer in peers):
        courier = TransferCourier(own_index, port, server, peers, group.process_id, processes)
        reason = courier.try_out(patience_s)
    reasons = group.all_gather(reason)
    if courier is not None and not any(reasons):
        return courier
    if group.is_leader:
        _log.warning(
            "KV passes through the host and process 0 from one device group to the other, as JAX "
            "cannot transfer arrays between these processes: %s",
            next(filter(None, reasons)),
        )
    return HostCourier(own_index, port)


def _server(
    group: ProcessGroup,
    executor: DeviceExecutor,
    serve: Callable[..., transfer.TransferServer],
) -> tuple[transfer.TransferServer | None, str]:
    """Return a server of arrays, or None and the reason."""
    address = f"{group.address}:0"
    try:
        return serve(executor.device.client, address, [address]), ""
    except jax.errors.JaxRuntimeError as error:
        return None, f"no server at {address} ({error})"


def _way(plan: StepPlan) -> tuple[int, int]:
    """Return the source group and the target group of a plan's handovers."""
    ways = {(each.source, each.target) for each in plan.handovers}
    if len(ways) > 1:
        raise NotImplementedError(
            "a plan that hands KV over in both directions, between groups in several processes"
        )
    return ways.pop()


@final
class _ToHost:
    def __init__(self, taken: Sequence[TakenPages]):
        self._taken = taken
        for each in taken:
            each.start_to_host()

    def is_ready(self) -> bool:
        return all(each.is_ready() for each in self._taken)

    def collect(self) -> Outcome:
        try:
            return tuple((each.pages, each.on_host()) for each in self._taken)
        except jax.errors.JaxRuntimeError as error:
            return str(error)


@final
class _Pulled:
    """Parts of pages that this process's devices are pulling."""

    def __init__(self, calls: Sequence[Sequence[Sequence[jax.Array]]]):
        self._leaves: list[Any] = jax.tree.leaves(calls)

    def is_ready(self) -> bool:
        return all(leaf.is_ready() for leaf in self._leaves)

    def collect(self) -> Outcome:
        try:
            jax.block_until_ready(self._leaves)
        except jax.errors.JaxRuntimeError as error:
            return str(error)
        return ()
