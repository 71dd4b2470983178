"""Pages in files: bounded, checked, and there again after a restart."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, final

from jaxserve.core.errors import InvalidConfigError

_log = logging.getLogger(__name__)

_MAGIC = b"jaxserve page 1\n"
_DIGEST_BYTES = 16
_SUFFIX = ".page"


class PageStore(Protocol):
    """Bytes by key, of which some may be dropped at any time. For one thread, except for `in`."""

    @property
    def folder(self) -> Path: ...

    @property
    def num_pages(self) -> int:
        """Pages that are there; read on any thread, as the next two."""
        ...

    @property
    def num_written(self) -> int: ...

    @property
    def num_read(self) -> int: ...

    def __contains__(self, key: bytes) -> bool: ...

    def write(self, key: bytes, contents: bytes) -> None: ...

    def read(self, key: bytes) -> bytes | None:
        """Return the contents; None where they are missing, or are not what was written."""
        ...

    def close(self) -> None: ...


@final
class PageFiles:
    """Bytes by key, each in a file of its own; the least recently used go when room is short.

    Reading checks a digest of key and contents: a file that is torn or rotten is deleted, and as
    good as never written. Where the disk fails or is full, pages are not kept, and the log says so
    once. For one thread at a time, except for `in`.

    Args:
      folder: made where it is missing, and this object's alone until `close`; files of former runs
        in it are found again.
      max_bytes: of all files together.

    Attributes:
      num_bytes: of all files.
      num_written, num_read, num_corrupt: files.

    Raises:
      InvalidConfigError: the folder cannot be made or read, or is in use.
    """

    def __init__(self, folder: Path, max_bytes: int):
        self.folder = folder
        self.num_bytes = 0
        self.num_written = 0
        self.num_read = 0
        self.num_corrupt = 0
        self._max_bytes = max_bytes
        # Least recently used first: bytes of the file.
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
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

    @property
    def num_pages(self) -> int:
        """Files that are there."""
        return len(self._sizes)

    def write(self, key: bytes, contents: bytes) -> None:
        """Keep it, in place of the least recently used, unless that fails."""
        size = _header_bytes() + len(contents)
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
        self._sizes[key] = size
        self.num_bytes += size
        self.num_written += 1

    def read(self, key: bytes) -> bytes | None:
        """The contents, or None where they are not there, or not what was written."""
        if key not in self._sizes:
            return None
        self._sizes.move_to_end(key)
        path = self._path(key)
        try:
            whole = path.read_bytes()
            os.utime(path)
        except OSError as error:
            self._report("read", error)
            whole = b""
        digest, contents = whole[len(_MAGIC) :][:_DIGEST_BYTES], whole[_header_bytes() :]
        if not whole.startswith(_MAGIC) or digest != _digest(key, contents):
            self.num_corrupt += 1
            _log.warning("%s is not what was written; its page is computed anew", path)
            self._delete(key)
            return None
        self.num_read += 1
        return contents

    def close(self) -> None:
        """Let others use the folder; files stay."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _claim(self) -> None:
        """Some file systems of networks have no such locks, and do without."""
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
        """What former runs left; the oldest beyond the bound go."""
        found = []
        for path in self.folder.iterdir():
            if path.suffix == ".part":
                path.unlink()
            elif path.suffix == _SUFFIX:
                with contextlib.suppress(ValueError):
                    stat = path.stat()
                    found.append((stat.st_mtime, bytes.fromhex(path.stem), stat.st_size))
        for _, key, size in sorted(found):
            self._sizes[key] = size
            self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            self._delete(next(iter(self._sizes)))

    def _delete(self, key: bytes) -> None:
        self.num_bytes -= self._sizes.pop(key, 0)
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
                *(what, self.folder, error),
            )


def _digest(key: bytes, contents: bytes) -> bytes:
    return blake2b(contents, digest_size=_DIGEST_BYTES, key=key).digest()


def _header_bytes() -> int:
    return len(_MAGIC) + _DIGEST_BYTES
