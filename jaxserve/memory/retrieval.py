"""Chunks on their way from the disk to the host, and who waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from jaxserve.memory.chunks import Branch
from jaxserve.memory.disk_tier import PATIENCE_S
from jaxserve.memory.page_cache import PageCache


@final
@dataclass(eq=False, slots=True)
class _Order:
    """What one sequence has asked for.

    Attributes:
      indices: of all these chunks in the sequence, by key.
      unread: those that the disk has not been told of, in their order.
      missing: those that have not come.
      loaded: indices of those that were put on the host.
    """

    branch: Branch
    indices: dict[bytes, int] = field(default_factory=dict)
    unread: deque[bytes] = field(default_factory=deque)
    missing: set[bytes] = field(default_factory=set)
    loaded: set[int] = field(default_factory=set)


@final
class Retrieval:
    """Has the disk read what sequences need before they can begin; `take_in` puts it on the host.

    Nobody asks for a chunk twice before `release`. Chunks that are spoilt, or have no room on the
    host, count as come: they are computed. So are all while the disk hangs.

    Args:
      cache: with its disk, if it has one.
      on_arrival: called on the disk's thread when there is something for `take_in`.
    """

    def __init__(self, cache: PageCache, now: Callable[[], float], on_arrival: Callable[[], None]):
        self._cache = cache
        self._now = now
        self._on_arrival = on_arrival
        self._orders: dict[int, _Order] = {}
        # Asked of the disk, and not come.
        self._underway: set[bytes] = set()
        self._last_news_s = 0.0
        self._hangs = False

    @property
    def has_arrived(self) -> bool:
        """Whether there is something for `take_in`."""
        disk = self._cache.disk
        return disk is not None and disk.has_arrived

    @property
    def gives_up_s(self) -> float | None:
        """Until when to wait for chunks that are still to come; None where there are none."""
        if self._hangs or not any(order.missing for order in self._orders.values()):
            return None
        return self._last_news_s + PATIENCE_S

    def awaits(self, sequence: int, keys: Sequence[bytes]) -> bool:
        """Whether chunks of a sequence are still to come; asks for those on the disk alone.

        Where the host has no room for them beside those of others that have not begun yet, they are
        asked for later.

        Args:
          sequence: its key.
          keys: of its pages, from the first on.
        """
        most = self._cache.max_host_pages
        if self._cache.disk is None or not most or self._hangs:
            return False
        order = self._orders.get(sequence)
        if order is not None and order.missing:
            return True
        asked = {} if order is None else order.indices
        wanted = {
            key: index
            for index, key in enumerate(keys)
            if key not in asked and self._cache.where(key) == "disk"
        }
        if not wanted:
            return False
        wanted = dict(list(wanted.items())[-most:])  # the later ones cost more
        others = sum(len(o.indices) for key, o in self._orders.items() if key != sequence)
        if others and others + len(wanted) > most:
            return True
        if order is None:
            order = self._orders[sequence] = _Order(Branch(self._now()))
        order.indices.update(wanted)
        order.unread.extend(wanted)
        order.missing.update(wanted)
        if not self._underway:
            self._last_news_s = self._now()
        self._ask_disk()
        return True

    def release(self, sequence: int) -> set[int]:
        """It begins or has ended; returns the indices of what was put on the host for it."""
        order = self._orders.pop(sequence, None)
        return set() if order is None else order.loaded

    def take_in(self) -> None:
        """Put what has arrived on the host; nobody waits for what does not come."""
        if self._cache.disk is None:
            return
        for key, contents in self._cache.disk.arrived():
            self._hangs = False
            self._last_news_s = self._now()
            self._underway.discard(key)
            self._settle(key, contents)
        self._ask_disk()
        gives_up_s = self.gives_up_s
        if gives_up_s is not None and self._now() >= gives_up_s:
            self._hangs = True
            self.clear()

    def clear(self) -> None:
        """Nobody waits any more; what arrives from now on is dropped."""
        self._orders.clear()

    def _ask_disk(self) -> None:
        disk = self._cache.disk
        assert disk is not None
        for order in self._orders.values():
            while order.unread:
                key = order.unread[0]
                if key not in self._underway:
                    if self._cache.where(key) != "disk":
                        self._settle(key, None)
                    elif not disk.read(key, self._on_arrival):
                        return
                    else:
                        self._underway.add(key)
                order.unread.popleft()

    def _settle(self, key: bytes, contents: bytes | None) -> None:
        for order in self._orders.values():
            if key not in order.missing:
                continue
            order.missing.discard(key)
            index = order.indices[key]
            if contents is not None and self._cache.bring(index, key, contents, order.branch):
                order.loaded.add(index)
