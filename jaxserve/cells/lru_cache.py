"""A least-recently-used cache."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar, final

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


@final
class LRUCache(Generic[_Key, _Value]):
    """A thread-safe cache that evicts the least recently used values above a total size."""

    def __init__(self, max_size: int):
        self._max_size = max_size
        self._size = 0
        self._entries: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: _Key) -> _Value | None:
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
            return found[0]

    def add(self, key: _Key, value: _Value, size: int) -> _Value:
        """Return the cached value of a key, or add this one and return it.

        A value that is larger than the cache is not kept.
        """
        if size > self._max_size:
            return value
        with self._lock:
            found = self._entries.setdefault(key, (value, size))
            if found[0] is value:
                self._size += size
                while self._size > self._max_size:
                    self._size -= self._entries.popitem(last=False)[1][1]
            return found[0]
