"""Chunks in files, below the host: bounded, checked, and there again after a restart."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, final

from jaxserve.core.errors import InvalidConfigError

_log = logging.getLogger(__name__)

_MAGIC = b"jaxserve page 1\n"
_DIGEST_BYTES = 16
_SUFFIX = ".page"
# Chunks on their way to the disk; what comes while so many are is not written.
_MAX_QUEUED = 64


class HostMemory(Protocol):
    """The contents of the host's pages, between two plans."""

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
class DiskTier:
    """Bytes by key, each in a file of its own; the least recently used go when room is short.

    Reading checks a digest of key and contents: a file that is torn or rotten is deleted, and as
    good as never written. Writing is done by a thread; where the disk fails or is full, chunks are
    not kept, and the log says so once. One engine uses a folder at a time.

    Args:
      folder: made where it is not there; files of former runs in it are found again.
      max_bytes: of all files together.

    Attributes:
      num_written, num_read, num_corrupt: files.

    Raises:
      InvalidConfigError: the folder cannot be made or read.
    """

    def __init__(self, folder: Path, max_bytes: int):
        self.num_written = 0
        self.num_read = 0
        self.num_corrupt = 0
        self._folder = folder
        self._max_bytes = max_bytes
        # Least recently used first: bytes of the file.
        self._files: OrderedDict[bytes, int] = OrderedDict()
        self._num_bytes = 0
        self._unwritten: dict[bytes, bytes] = {}
        self._queue: queue.Queue[bytes | None] = queue.Queue(_MAX_QUEUED)
        self._lock = threading.Lock()
        self._has_failed = False
        try:
            self._take_in()
        except OSError as error:
            raise InvalidConfigError(
                f"disk_folder={str(folder)!r} cannot be used ({error}); give a folder that this "
                "process may write to"
            ) from error
        self._thread = threading.Thread(target=self._write_all, name="jaxserve-disk", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return self._num_bytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._unwritten or key in self._files

    def put(self, key: bytes, contents: bytes, *, waits: bool = False) -> None:
        """Write later; what is there already is not written again.

        Args:
          waits: for those before it, where too many are on their way; else it is not kept then.
        """
        with self._lock:
            if key in self or (self._queue.full() and not waits):
                return
            self._unwritten[key] = contents
        self._queue.put(key)

    def get(self, key: bytes) -> bytes | None:
        """The contents, or None where they are not there, or not what was written."""
        with self._lock:
            if key in self._unwritten:
                return self._unwritten[key]
            if key not in self._files:
                return None
            self._files.move_to_end(key)
        path = self._path(key)
        try:
            whole = path.read_bytes()
            os.utime(path)
        except OSError as error:
            with self._lock:
                if key not in self._files:  # given up for another just now
                    return None
            self._report("read", error)
            whole = b""
        digest, contents = whole[len(_MAGIC) :][:_DIGEST_BYTES], whole[_header_bytes() :]
        if not whole.startswith(_MAGIC) or digest != _digest(key, contents):
            self.num_corrupt += 1
            _log.warning("%s is not what was written; its chunk is computed anew", path)
            with self._lock:
                self._delete(key)
            return None
        self.num_read += 1
        return contents

    def flush(self) -> None:
        """Wait until everything is written."""
        self._queue.join()

    def close(self) -> None:
        """Write what is waiting, and stop; files stay."""
        self._queue.put(None)
        self._thread.join()

    # ---- on its thread ----

    def _write_all(self) -> None:
        while (key := self._queue.get()) is not None:
            try:
                self._write(key, self._unwritten[key])
            except OSError as error:
                self._report("written", error)
            finally:
                with self._lock:
                    del self._unwritten[key]
                self._queue.task_done()
        self._queue.task_done()

    def _write(self, key: bytes, contents: bytes) -> None:
        size = _header_bytes() + len(contents)
        with self._lock:
            while self._files and self._num_bytes + size > self._max_bytes:
                self._delete(next(iter(self._files)))
        if size > self._max_bytes:
            return
        path = self._path(key)
        unfinished = path.with_suffix(".part")
        try:
            unfinished.write_bytes(_MAGIC + _digest(key, contents) + contents)
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        with self._lock:
            self._files[key] = size
            self._num_bytes += size
            self.num_written += 1

    # ---- files ----

    def _take_in(self) -> None:
        """Find what former runs left; the oldest beyond the bound go."""
        self._folder.mkdir(parents=True, exist_ok=True)
        found = []
        for path in self._folder.iterdir():
            if path.suffix == ".part":
                path.unlink()
            elif path.suffix == _SUFFIX:
                with contextlib.suppress(ValueError):
                    stat = path.stat()
                    found.append((stat.st_mtime, bytes.fromhex(path.stem), stat.st_size))
        for _, key, size in sorted(found):
            self._files[key] = size
            self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            self._delete(next(iter(self._files)))

    def _delete(self, key: bytes) -> None:
        self._num_bytes -= self._files.pop(key, 0)
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            self._report("deleted", error)

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}{_SUFFIX}"

    def _report(self, what: str, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            _log.error(
                "a kept page could not be %s in %s (%s); chunks that the disk does not keep are "
                "computed anew. Further failures are not reported",
                *(what, self._folder, error),
            )


def _digest(key: bytes, contents: bytes) -> bytes:
    return blake2b(contents, digest_size=_DIGEST_BYTES, key=key).digest()


def _header_bytes() -> int:
    return len(_MAGIC) + _DIGEST_BYTES
