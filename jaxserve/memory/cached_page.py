"""Cached pages, named by the tokens that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import final

import numpy as np

_KEY_BYTES = 16


@final
class PageKeys:
    """Keys of the full pages of a token sequence: each hashes everything up to its page's end.

    Equal keys mean equal tokens from the first on, in this process and in any other.

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
        """Return the keys of `tokens`, which may only have grown since the last call.

        Args:
          identity: of the model and its weights.
        """
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
        """Return the keys of pages `start` to `stop`; None unless `of` has computed them.

        It costs as much as there are, so that the tokens of a long context are not read again.
        """
        if identity != self._identity or stop > len(self._keys):
            return None
        return self._keys[start:stop]

    def anew(self) -> PageKeys:
        """Return keys for a sequence that begins anew with the same prompt."""
        return PageKeys(self._whole, self._adapter)


def _bytes(tokens: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(tokens, np.int64).tobytes()


def _key(page: bytes, before: bytes) -> bytes:
    return blake2b(page, digest_size=_KEY_BYTES, key=before).digest()


@final
@dataclass(eq=False, slots=True)
class Branch:
    """A conversation as the cache sees it: a chain of cached pages up to its last one, the tip.

    It counts for the value of its pages as long as its tip lies anywhere.

    Attributes:
      returns: whether it is sure to go on: its sequence was preempted, or more turns are expected.
    """

    last_active_s: float
    tip: CachedPage | None = None
    is_running: bool = False
    returns: bool = False

    @property
    def counts(self) -> bool:
        return self.is_running or (self.tip is not None and self.tip.is_resident)

    def begin(self, cached: Sequence[CachedPage], now_s: float) -> None:
        """Be active now, with these pages up to the tip."""
        self.last_active_s = now_s
        for page in cached:
            page.join(self)
            self.tip = page

    def run(self) -> None:
        """A sequence continues it."""
        self.is_running, self.returns = True, False

    def grow_to(self, page: CachedPage) -> None:
        """Have its tip there."""
        self.tip = page

    def rest(self, now_s: float | None = None, *, returns: bool = False) -> None:
        """No sequence continues it any more.

        Args:
          now_s: when it was active until now; None where its pages are not right.
        """
        self.is_running, self.returns = False, returns
        if now_s is not None:
            self.last_active_s = now_s


@final
@dataclass(eq=False, slots=True)
class CachedPage:
    """KV of one full page after a certain prefix, and where it lies: the unit of eviction.

    Attributes:
      index: of the page in its sequence.
      key: None while some of its tokens have not been read yet.
      device_page, host_page: pages of the pools that hold it; None where it does not lie there.
      branches: conversations that it belongs to.
      num_uses: how often its value has changed by use.
      is_counted: whether `count_once` was called since it was used last.
    """

    index: int
    key: bytes | None = None
    device_page: int | None = None
    host_page: int | None = None
    branches: list[Branch] = field(default_factory=list)
    num_uses: int = 0
    is_counted: bool = False
    _max_branches: int = 16

    @property
    def is_resident(self) -> bool:
        return self.device_page is not None or self.host_page is not None

    def count_once(self) -> bool:
        """Return whether this is the first call since the page was used."""
        is_first, self.is_counted = not self.is_counted, True
        return is_first

    def join(self, branch: Branch) -> None:
        """Belong to that conversation too, from here on."""
        self.num_uses += 1
        self.is_counted = False
        if branch in self.branches:
            return
        if len(self.branches) >= self._max_branches:
            self.branches = [each for each in self.branches if each.counts]
            self._max_branches = 16 + 2 * len(self.branches)
        self.branches.append(branch)
