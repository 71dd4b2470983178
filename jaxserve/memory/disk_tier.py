"""The disk below the host, behind a thread, so that no other thread waits for a file."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final

from jaxserve.memory.page_files import PageStore

_log = logging.getLogger(__name__)

# Pages on their way to the disk, at most; what comes beside them is not written.
_MAX_WRITING = 64
# Pages that were asked for and not taken yet, at most.
_MAX_READING = 64
# A disk that finishes nothing in this time is not waited for.
PATIENCE_S = 10.0


class HostMemory(Protocol):
    """The contents of the host's pages, between two plans."""

    def has_arrived(self, host_page: int) -> bool:
        """Whether `read_host_page` returns at once: no copy to the page is on its way or failed."""
        ...

    def read_host_page(self, host_page: int) -> bytes:
        """What the plans submitted so far leave there."""
        ...

    def write_host_page(self, host_page: int, contents: bytes) -> None:
        """Put something there that `read_host_page` gave, maybe in another run."""
        ...

    def fingerprint(self) -> bytes:
        """Of all that contents depend on beside tokens: the model, its weights, pages' shape."""
        ...


@final
@dataclass(frozen=True, slots=True)
class DiskUsage:
    """Pages on a disk, and pages written to it and read back since the start; 0 without a disk."""

    num_pages: int = 0
    num_written: int = 0
    num_read: int = 0


NO_DISK = DiskUsage()


@final
class DiskTier:
    """Writes pages to files, and reads them back, on a thread of its own; reading goes first.

    Contents of what was read come with `arrived`.

    Args:
      files: closed with the tier.
      patience_s: a disk that finishes nothing in this time is not waited for.

    Attributes:
      files: touched by the thread alone, except for `in` and its counters.
    """

    def __init__(self, files: PageStore, *, patience_s: float = PATIENCE_S):
        self.files = files
        self._patience_s = patience_s
        self._changed = threading.Condition()
        # Keys, and what to call once they have arrived.
        self._reads: deque[tuple[bytes, Callable[[], None]]] = deque()
        self._arrived: list[tuple[bytes, bytes | None]] = []
        self._num_reading = 0
        # What is to be written, until it is.
        self._writes: dict[bytes, bytes] = {}
        self._num_done = 0
        self._is_busy = False
        self._is_closing = False
        self._is_given_up = False
        self._thread = threading.Thread(target=self._work, name="jaxserve-disk", daemon=True)
        self._thread.start()

    def __contains__(self, key: bytes) -> bool:
        return key in self._writes or key in self.files

    def put(self, key: bytes, contents: bytes, *, waits: bool = False) -> None:
        """Write later; what is there already is not written again.

        Args:
          waits: for those before it, where too many are on their way; else it is not kept then.
        """
        with self._changed:
            if key in self or self._is_given_up:
                return
            if waits:
                self._wait_until(lambda: len(self._writes) < _MAX_WRITING)
            if len(self._writes) < _MAX_WRITING:
                self._writes[key] = contents
                self._changed.notify_all()

    def read(self, key: bytes, on_arrival: Callable[[], None] = lambda: None) -> bool:
        """Have contents arrive later; False where too many are on their way.

        Args:
          on_arrival: called on the disk's thread when `arrived` has the contents, unless it has
            them at once.
        """
        with self._changed:
            if self._num_reading >= _MAX_READING:
                return False
            self._num_reading += 1
            if key in self._writes:
                self._arrived.append((key, self._writes[key]))
            else:
                self._reads.append((key, on_arrival))
                self._changed.notify_all()
        return True

    @property
    def usage(self) -> DiskUsage:
        """What is on the disk, and what was written and read; the thread may write meanwhile."""
        return DiskUsage(self.files.num_pages, self.files.num_written, self.files.num_read)

    @property
    def has_arrived(self) -> bool:
        """Whether `arrived` has something to give."""
        return bool(self._arrived)

    def arrived(self) -> list[tuple[bytes, bytes | None]]:
        """Keys that were read since the last call, in their order, and their contents.

        None where they are not there, or not what was written.
        """
        with self._changed:
            arrived, self._arrived = self._arrived, []
            self._num_reading -= len(arrived)
        return arrived

    def flush(self) -> None:
        """Wait until everything is written and read."""
        with self._changed:
            self._wait_until(lambda: not (self._reads or self._writes or self._is_busy))

    def close(self) -> None:
        """Write what is waiting, and stop; files stay.

        Ctrl-C ends this with the file that is being written just then; a disk that hangs is left.
        """
        with self._changed:
            self._is_closing = True
            self._reads.clear()
            self._changed.notify_all()
            try:
                is_done = self._wait_until(lambda: not (self._writes or self._is_busy))
            except BaseException:
                self._writes.clear()
                if self._wait_until(lambda: not self._is_busy):
                    self.files.close()
                raise
        if is_done:
            self._thread.join()
            self.files.close()

    def _wait_until(self, is_so: Callable[[], bool]) -> bool:
        """With the lock held; False where the disk hangs."""
        while not is_so() and not self._is_given_up:
            before = self._num_done
            if not self._changed.wait_for(lambda n=before: self._num_done != n, self._patience_s):
                self._is_given_up = True
                _log.error(
                    "%s has not answered for %.0f s; what is not on the disk yet is not kept",
                    *(self.files.folder, self._patience_s),
                )
        return is_so()

    # ---- on its thread ----

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._reads or self._writes or self._is_closing)
                if self._is_given_up or not (self._reads or self._writes):
                    return
                self._is_busy = True
                on_arrival = contents = None
                if self._reads:
                    key, on_arrival = self._reads.popleft()
                else:
                    key, contents = next(iter(self._writes.items()))
            if contents is None:
                contents = self.files.read(key)
            else:
                self.files.write(key, contents)
            with self._changed:
                self._is_busy = False
                self._num_done += 1
                if on_arrival is not None:
                    self._arrived.append((key, contents))
                else:
                    self._writes.pop(key, None)
                self._changed.notify_all()
            if on_arrival is not None:
                on_arrival()
