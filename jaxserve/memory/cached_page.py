"""Cached pages, named by the tokens that they hold."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import attrgetter
from typing import final

import numpy as np

_KEY_BYTES = 16
# What follows the key of the last full page in the key of a state, which is longer than any page's.
TAIL_BYTES = 2 + _KEY_BYTES
_INDEX = attrgetter("index")


@final
class PageKeys:
    """Keys of the full pages of a token sequence: each hashes everything up to its page's end.

    Equal keys mean equal tokens from the first on, in any process.

    Args:
      whole: tokens that every key depends on, since an encoder computes them as a whole.
      adapter: identity of the adapter that computes the pages; empty without one.
    """

    def __init__(self, whole: Sequence[int] = (), adapter: bytes = b"") -> None:
        self._whole = whole
        self._adapter = adapter
        self._identity: bytes | None = None
        self._root = b""
        self._keys: list[bytes] = []

    def of(
        self, tokens: Sequence[int] | np.ndarray, page_size: int, identity: bytes
    ) -> Sequence[bytes]:
        """Return the keys of `tokens`, which only grow between calls, for `identity`'s weights."""
        if identity != self._identity:
            self._identity = self._root = identity
            self._keys = []
            if self._adapter:
                self._root = _key(self._adapter, self._root)
            if self._whole:
                self._root = _key(_bytes(self._whole), self._root)
        keys, num_pages = self._keys, len(tokens) // page_size
        if len(keys) < num_pages:
            last = keys[-1] if keys else self._root
            new = _bytes(tokens[len(keys) * page_size : num_pages * page_size])
            page_bytes = len(new) // (num_pages - len(keys))
            for start in range(0, len(new), page_bytes):
                last = _key(new[start : start + page_bytes], last)
                keys.append(last)
        return keys[:num_pages]

    def known(self, start: int, stop: int, identity: bytes) -> Sequence[bytes] | None:
        """Return the keys of pages `start` to `stop`; None unless `of` has computed them."""
        if identity != self._identity or stop > len(self._keys):
            return None
        return self._keys[start:stop]

    @property
    def root(self) -> bytes:
        """The key before the first page, for the identity of the last `of`."""
        return self._root

    def anew(self) -> PageKeys:
        return PageKeys(self._whole, self._adapter)


def _bytes(tokens: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(tokens, np.int64).tobytes()


def _key(page: bytes, before: bytes) -> bytes:
    return blake2b(page, digest_size=_KEY_BYTES, key=before).digest()


def state_key(page_key: bytes, tail: Sequence[int]) -> bytes:
    """Return the key of a state: that of the full pages before it, and the tokens after these."""
    return page_key + len(tail).to_bytes(2, "big") + _key(_bytes(tail), page_key)


def tail_length(key: bytes) -> int:
    """Return the number of tokens after the full pages before a state."""
    return int.from_bytes(key[-TAIL_BYTES:-_KEY_BYTES], "big")


@final
class BranchPages:
    """The pages of a conversation on one tier, in order. Those that are not there are skipped."""

    __slots__ = ("_is_there", "_pages", "_start")

    def __init__(self, is_there: Callable[[CachedPage], bool]):
        self._is_there = is_there
        self._pages: list[CachedPage] = []
        # The pages before it have left.
        self._start = 0

    def put(self, page: CachedPage) -> None:
        pages = self._pages
        if pages and pages[-1].index > page.index:
            bisect.insort(pages, page, lo=self._start, key=_INDEX)
        else:
            pages.append(page)

    @property
    def is_empty(self) -> bool:
        pages, start = self._pages, self._start
        while start < len(pages) and not self._is_there(pages[start]):
            start += 1
        if 2 * start > len(pages):
            del pages[:start]
            start = 0
        self._start = start
        return not pages

    def first(self, index: int, may_go: Callable[[CachedPage], bool]) -> CachedPage | None:
        """Return the first page from `index` on that may go and is not shared, by linear search."""
        if self.is_empty:
            return None
        pages = self._pages
        for at in range(bisect.bisect_left(pages, index, self._start, key=_INDEX), len(pages)):
            page = pages[at]
            if len(page.branches) == 1 and may_go(page):
                return page
        return None


def _is_on_device(page: CachedPage) -> bool:
    return page.device_page is not None


def _is_on_host(page: CachedPage) -> bool:
    return page.host_page is not None


def _is_uncopied(page: CachedPage) -> bool:
    return page.device_page is not None and page.host_page is None


@final
@dataclass(eq=False, slots=True)
class Branch:
    """A conversation in the cache: a chain of cached pages up to its last one, the tip.

    It counts for the value of its pages while its tip is on the device or the host.

    Attributes:
      returns: whether it will continue: its sequence was preempted, or more turns are expected.
      is_awaited: whether its pages are being read from the disk for a waiting sequence.
      is_held: whether its pages stay on the device for its next turn, if others can go.
      shared: pages that belonged to this conversation first, and to other ones too.
      on_device, on_host, uncopied: pages that belonged to this conversation first, by tier;
        `uncopied` has those that are on the device alone.
    """

    last_active_s: float
    tip: CachedPage | None = None
    is_running: bool = False
    returns: bool = False
    is_awaited: bool = False
    is_held: bool = False
    num_uses: int = 0
    shared: list[CachedPage] = field(default_factory=list)
    on_device: BranchPages = field(default_factory=lambda: BranchPages(_is_on_device))
    on_host: BranchPages = field(default_factory=lambda: BranchPages(_is_on_host))
    uncopied: BranchPages = field(default_factory=lambda: BranchPages(_is_uncopied))

    @property
    def counts(self) -> bool:
        return self.is_running or (self.tip is not None and self.tip.is_resident)

    def begin(self, cached: Sequence[CachedPage], now_s: float) -> None:
        """Mark it as active, with these pages up to the tip."""
        self.last_active_s = now_s
        self.num_uses += 1
        for page in cached:
            if self not in page.branches:
                page.join(self)
        if cached:
            self.tip = cached[-1]

    def run(self) -> None:
        self.is_running, self.returns = True, False

    def grow_to(self, page: CachedPage) -> None:
        self.tip = page

    def rest(self, now_s: float | None = None, *, returns: bool = False) -> None:
        """Record that no sequence continues it; `now_s` is None if its pages are wrong."""
        self.is_running, self.returns = False, returns
        self.num_uses += 1
        if now_s is not None:
            self.last_active_s = now_s

    def arrived(self) -> None:
        self.is_awaited = False

    def hold(self, *, is_held: bool) -> None:
        self.is_held = is_held

    def shared_pages(self) -> list[CachedPage]:
        """Return the pages of `shared` that are resident; drop the rest."""
        self.shared = [page for page in self.shared if page.is_resident]
        return self.shared

    @property
    def is_empty(self) -> bool:
        return self.on_device.is_empty and self.on_host.is_empty


@final
@dataclass(eq=False, slots=True)
class CachedPage:
    """KV of one full page after a certain prefix, and where it is: the unit of eviction.

    The `key` is None while some of its tokens have not been read yet. `branches` are its
    conversations, and `num_uses` counts uses by none of them.
    """

    index: int
    key: bytes | None = None
    device_page: int | None = None
    host_page: int | None = None
    branches: list[Branch] = field(default_factory=list)
    num_uses: int = 0
    # The first of the conversations that it ever belonged to.
    _home: Branch | None = None
    # The uses when `count_once` was last called.
    _counted_at: int = -1
    _max_branches: int = 16

    @property
    def is_resident(self) -> bool:
        return self.device_page is not None or self.host_page is not None

    def put_on_device(self, device_page: int) -> None:
        self.device_page = device_page
        if self._home is not None:
            self._home.on_device.put(self)
            if self.host_page is None:
                self._home.uncopied.put(self)

    def leave_device(self) -> None:
        self.device_page = None

    def put_on_host(self, host_page: int) -> None:
        self.host_page = host_page
        if self._home is not None:
            self._home.on_host.put(self)

    def leave_host(self) -> None:
        self.host_page = None
        if self._home is not None and self.device_page is not None:
            self._home.uncopied.put(self)

    @property
    def uses(self) -> int:
        """How often a use has changed its value."""
        num = self.num_uses
        for branch in self.branches:
            num += branch.num_uses
        return num

    def count_once(self) -> bool:
        """Return whether this is the first call since the page was used."""
        before, self._counted_at = self._counted_at, self.uses
        return before != self._counted_at

    def join(self, branch: Branch) -> None:
        self.num_uses += 1
        if branch in self.branches:
            return
        if self._home is None:
            self._home = branch
            self._stand_in_line()
        elif len(self.branches) == 1:
            self._home.shared.append(self)
        if len(self.branches) >= self._max_branches:
            self.branches = [each for each in self.branches if each.counts]
            self._max_branches = 16 + 2 * len(self.branches)
        self.branches.append(branch)

    def _stand_in_line(self) -> None:
        if self.host_page is not None:
            self.put_on_host(self.host_page)
        if self.device_page is not None:
            self.put_on_device(self.device_page)
