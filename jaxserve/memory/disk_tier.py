"""The disk tier below the host: pages, and states, in files that a thread reads and writes."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.memory.cached_page import TAIL_BYTES

_log = logging.getLogger(__name__)

_MAGIC = b"jaxserve page 1\n"
_DIGEST_BYTES = 16
_SUFFIX = ".page"
# The most pages, and about the most bytes, that wait to be written; others are not written.
_MAX_WRITING, _MAX_WRITING_BYTES = 64, 1 << 30
# The most pages that are requested and not taken yet.
_MAX_READING = 64
# A disk that finishes nothing in this time is given up.
PATIENCE_S = 10.0


class PageStore(Protocol):
    """Bytes by key; any may be dropped at any time.

    For one thread, except for `in` and `states_after`.
    """

    @property
    def folder(self) -> Path: ...

    @property
    def num_pages(self) -> int:
        """Number of stored pages, without states; this and the next two are for any thread."""
        ...

    @property
    def num_written(self) -> int: ...

    @property
    def num_read(self) -> int: ...

    def __contains__(self, key: bytes) -> bool: ...

    def states_after(self, page_key: bytes) -> Sequence[bytes]:
        """Return the keys of the stored states (`state_key`) after these full pages."""
        ...

    def write(self, key: bytes, contents: bytes) -> None: ...

    def use(self, key: bytes) -> None:
        """Count a stored key as used now; do nothing for another."""
        ...

    def read(self, key: bytes) -> bytes | None:
        """Return the contents; None if they are missing or corrupt."""
        ...

    def close(self) -> None: ...


@final
class PageFiles:
    """A store with one file for each key; the least recently used are deleted when it is full.

    Reading checks a digest of key and contents: a torn or corrupt file is deleted and counts as
    missing. If the disk fails or is full, pages are not kept, and the log says so once. For one
    thread at a time, except for `in` and `states_after`.

    Args:
      folder: created if missing, and owned by this object until `close`. Files of former runs in it
        are found again.
      max_bytes: of all files together.

    Raises:
      InvalidConfigError: the folder cannot be made or read, or is in use.
    """

    def __init__(self, folder: Path, max_bytes: int):
        self.folder = folder
        self.num_bytes = 0
        self.num_pages = 0
        self.num_written = 0
        self.num_read = 0
        self.num_corrupt = 0
        self._max_bytes = max_bytes
        # Least recently used first: bytes of the file.
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._states: dict[bytes, tuple[bytes, ...]] = {}  # by the page key that they begin with
        self._has_failed = False
        self._lock: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            self._claim()
            self._find_again()
        except OSError as error:
            raise InvalidConfigError(
                f"disk_folder={str(folder)!r} cannot be used ({error}); give a folder that this "
                "process may write to"
            ) from error

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def states_after(self, page_key: bytes) -> Sequence[bytes]:
        return self._states.get(page_key, ())

    def write(self, key: bytes, contents: bytes) -> None:
        """Write a file, and delete the least recently used to make room. Errors are logged."""
        size = file_bytes(len(contents))
        while self._sizes and self.num_bytes + size > self._max_bytes:
            self._delete(next(iter(self._sizes)))
        if size > self._max_bytes:
            return
        path = self._path(key)
        unfinished = path.with_suffix(".part")
        try:
            unfinished.write_bytes(_MAGIC + _digest(key, contents) + contents)
            unfinished.replace(path)
        except OSError as error:
            self._report("written", error)
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            return
        self._add(key, size)
        self.num_written += not _is_state(key)

    def use(self, key: bytes) -> None:
        if key in self._sizes:
            self._sizes.move_to_end(key)
            with contextlib.suppress(OSError):
                os.utime(self._path(key))

    def read(self, key: bytes) -> bytes | None:
        if key not in self._sizes:
            return None
        self.use(key)
        path = self._path(key)
        try:
            whole = path.read_bytes()
        except OSError as error:
            self._report("read", error)
            whole = b""
        digest, contents = whole[len(_MAGIC) :][:_DIGEST_BYTES], whole[file_bytes(0) :]
        if not whole.startswith(_MAGIC) or digest != _digest(key, contents):
            self.num_corrupt += 1
            _log.warning("%s is not what was written; its page is computed anew", path)
            self._delete(key)
            return None
        self.num_read += not _is_state(key)
        return contents

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _claim(self) -> None:
        """Lock the folder; on network file systems without locks, continue unlocked."""
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise InvalidConfigError(
                f"disk_folder={str(self.folder)!r} is in use by another runtime; wait for its end, "
                "or give another folder"
            ) from None
        except OSError as error:
            _log.info("%s cannot be locked: %s", self.folder, error)

    def _find_again(self) -> None:
        """Find the files of former runs; the oldest beyond the limit are deleted."""
        found = []
        for path in self.folder.iterdir():
            if path.suffix == ".part":
                path.unlink()
            elif path.suffix == _SUFFIX:
                with contextlib.suppress(ValueError):
                    stat = path.stat()
                    found.append((stat.st_mtime, bytes.fromhex(path.stem), stat.st_size))
        for _, key, size in sorted(found):
            self._add(key, size)
        while self.num_bytes > self._max_bytes:
            self._delete(next(iter(self._sizes)))

    def _add(self, key: bytes, size: int) -> None:
        self._sizes[key] = size
        self.num_bytes += size
        if _is_state(key):
            before = key[:-TAIL_BYTES]
            self._states[before] = (*self.states_after(before), key)
        else:
            self.num_pages += 1

    def _delete(self, key: bytes) -> None:
        self.num_bytes -= self._sizes.pop(key)
        if _is_state(key):
            before = key[:-TAIL_BYTES]
            others = tuple(each for each in self._states.pop(before) if each != key)
            if others:
                self._states[before] = others
        else:
            self.num_pages -= 1
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            self._report("deleted", error)

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{_SUFFIX}"

    def _report(self, what: str, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            _log.error(
                "a kept page could not be %s in %s (%s); pages that the disk does not keep are "
                "computed anew. Further failures are not reported",
                what,
                self.folder,
                error,
            )


def _digest(key: bytes, contents: bytes) -> bytes:
    return blake2b(contents, digest_size=_DIGEST_BYTES, key=key).digest()


def _is_state(key: bytes) -> bool:
    return len(key) > TAIL_BYTES


def file_bytes(num_bytes: int) -> int:
    """Return the size of a file with contents of `num_bytes`."""
    return len(_MAGIC) + _DIGEST_BYTES + num_bytes


class HostMemory(Protocol):
    """The contents of the host's entries, which are pages or states, between two plans."""

    @property
    def entry_bytes(self) -> int: ...

    def has_arrived(self, entry: int) -> bool:
        """Whether `read` returns at once: no copy to the entry is pending or failed."""
        ...

    def read(self, entry: int) -> bytes:
        """Return the contents of the entry after all plans submitted so far."""
        ...

    def write(self, entry: int, contents: bytes) -> None:
        """Write contents that `read` returned, maybe in another run."""
        ...

    def fingerprint(self) -> bytes:
        """Return a digest of what contents depend on besides tokens: model, weights, page shape."""
        ...


@final
@dataclass(frozen=True, slots=True)
class DiskUsage:
    """Pages on a disk, and pages written and read since the start; 0 without a disk."""

    num_pages: int = 0
    num_written: int = 0
    num_read: int = 0


NO_DISK = DiskUsage()


@final
class DiskTier:
    """Writes pages and states to files, and reads them, on a thread of its own. Reads go first.

    `arrived` returns what was read. The disk is given up when it finishes nothing in `patience_s`.
    `files` is closed with the tier, and used by the thread alone, except for what other threads may
    read of a `PageStore`.
    """

    def __init__(self, files: PageStore, *, patience_s: float = PATIENCE_S):
        self.files = files
        self._patience_s = patience_s
        self._changed = threading.Condition()
        # Keys, and what to call once they have arrived.
        self._reads: deque[tuple[bytes, Callable[[], None]]] = deque()
        self._arrived: list[tuple[bytes, bytes | None]] = []
        self._num_reading = 0
        # Contents to write, until they are written, and keys that were used without being read.
        self._writes: dict[bytes, bytes] = {}
        self._used: dict[bytes, None] = {}
        self._num_done = 0
        self._is_busy = False
        self._is_closing = False
        self._is_given_up = False
        self._thread = threading.Thread(target=self._work, name="jaxserve-disk", daemon=True)
        self._thread.start()

    def __contains__(self, key: bytes) -> bool:
        return key in self._writes or key in self.files

    def states_after(self, page_key: bytes) -> list[bytes]:
        """Return the keys of the states (`state_key`) after these full pages."""
        pending = [key for key in list(self._writes) if key[:-TAIL_BYTES] == page_key]
        return [*pending, *self.files.states_after(page_key)]

    def use(self, key: bytes) -> bool:
        """Return whether the disk has a page, which then counts as used now."""
        with self._changed:
            is_here = key in self
            if key in self.files and not self._is_given_up:
                self._used[key] = None
                self._changed.notify_all()
        return is_here

    def put(self, key: bytes, contents: bytes, *, waits: bool = False) -> None:
        """Write a page later, unless the disk has it; if too many wait, drop it unless `waits`."""
        with self._changed:
            if key in self or self._is_given_up:
                return
            if waits:
                self._wait_until(self._has_room)
            if self._has_room():
                self._writes[key] = contents
                self._changed.notify_all()

    def read(self, key: bytes, on_arrival: Callable[[], None] = lambda: None) -> bool:
        """Read a page later; return False if too many reads are pending.

        `on_arrival` is called on the disk's thread, unless `arrived` has the contents at once.
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

    def _has_room(self) -> bool:
        num_bytes = sum(map(len, self._writes.values()))
        return len(self._writes) < _MAX_WRITING and num_bytes < _MAX_WRITING_BYTES

    @property
    def usage(self) -> DiskUsage:
        return DiskUsage(self.files.num_pages, self.files.num_written, self.files.num_read)

    @property
    def has_arrived(self) -> bool:
        return bool(self._arrived)

    def arrived(self) -> list[tuple[bytes, bytes | None]]:
        """Return (key, contents) read since the last call; None for missing or corrupt contents."""
        with self._changed:
            arrived, self._arrived = self._arrived, []
            self._num_reading -= len(arrived)
        return arrived

    def flush(self) -> None:
        with self._changed:
            self._wait_until(
                lambda: not (self._reads or self._writes or self._used or self._is_busy)
            )

    def close(self) -> None:
        """Finish the pending writes, unless the disk hangs, and stop the thread; the files stay.

        Ctrl-C ends this after the file that is being written.
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
        """Wait for a condition (lock held). Return False if the disk hangs."""
        while not is_so() and not self._is_given_up:
            before = self._num_done
            if not self._changed.wait_for(lambda n=before: self._num_done != n, self._patience_s):
                self._is_given_up = True
                _log.error(
                    "%s has not answered for %.0f s; what is not on the disk yet is not kept",
                    self.files.folder,
                    self._patience_s,
                )
        return is_so()

    # ---- on its thread ----

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._reads or self._writes or self._used or self._is_closing
                )
                if self._is_given_up or not (self._reads or self._writes or self._used):
                    return
                self._is_busy = True
                used, self._used = self._used, {}
            for key in used:
                self.files.use(key)
            with self._changed:
                if not (self._reads or self._writes):
                    self._is_busy = False
                    self._num_done += 1
                    self._changed.notify_all()
                    continue
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
