"""Compiled executables on disk, so that a later process loads them without tracing.

An executable is native code, and its entry is unpickled. The store is therefore a folder of its own
that only this user can write to, and so is each entry.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import stat
import tempfile
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import jax
from jax.experimental import serialize_executable

from pallas_kernels.cpu_targets import register_called
from pallas_kernels.own_files import is_own, read_own_file

_log = logging.getLogger(__name__)

MAX_BYTES = 2 << 30
# Entries are also few hundred bytes each that name an executable.
_MAX_ENTRIES = 20_000
_SUFFIX = ".compiled"
# Executables that a start uses before it is said to have begun.
_MAX_FIRST = 12


@final
class ExecutableStore:
    """A folder of executables by key; the least recently used entries are removed.

    A key must name everything that decides the program, see `steps.executable_identity`. Several
    processes may use a folder at once: an entry is written aside and renamed. It starts with a
    digest of its key and contents. An entry that cannot be loaded counts as absent, is removed, and
    causes one line in the log; one that calls a kernel that this process cannot compile, or not any
    more because it ends, stays. If the folder cannot be used, the store is empty and keeps nothing.

    Args:
      folder: created if it does not exist, for this user alone.
      max_bytes: size of all entries together; a process may exceed it by a sixteenth before it
        looks through the folder again.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES):
        self.folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # Bytes that this process may save before the folder is looked through again.
        self._room = 0
        self._is_usable = self._is_ours()
        self._expected: dict[str, Future[jax.stages.Compiled | None]] = {}
        # The key under which the keys of the executables that are used first are written.
        self._first_key: str | None = None
        self._keys_before: set[str] = set()
        self._first: list[str] = []
        self._first_before: list[str] = []
        self._knows_first = False

    def expect(self, key: str) -> bool:
        """Expect the executables that an earlier process used first after the same call.

        `load_expected` loads them while this process does something else. What it uses first is
        written for the next one. A wrong expectation costs time only.

        Returns:
          Whether `load_expected` has anything to do: not for a key that was expected before.
        """
        with self._lock:
            self._knows_first = False
            if key in self._keys_before:
                return False
            self._keys_before.add(key)
            self._first_key, self._first = key, []
            self._first_before = (self.read(key) or b"").decode().split()
            self._expected = {name: Future() for name in self._first_before}
            self._knows_first = bool(self._expected)
            return self._knows_first

    @property
    def knows_first(self) -> bool:
        """Whether an earlier process left what this start uses first, until `end_start`."""
        return self._knows_first

    def end_start(self) -> None:
        """Drop the executables that were expected and not used; the start is over."""
        with self._lock:
            expected, self._expected = self._expected, {}
            self._knows_first = False
        for future in expected.values():
            future.cancel()

    def load_expected(self, devices: list[Any]) -> None:
        """Load what is expected and not loaded yet; for a thread of its own."""
        for key, future in list(self._expected.items()):
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._loaded(key, devices))
                except BaseException as error:
                    future.set_exception(error)

    def note_use(self, key: str) -> None:
        """Note that an executable was called for the first time."""
        with self._lock:
            first = self._first
            if self._first_key is None or key in first or len(first) == _MAX_FIRST:
                return
            first.append(key)
            is_known = self._first_before[: len(first)] == first
            where, contents = self._first_key, " ".join(first).encode()
        if not is_known:
            self.write(where, contents)

    def load(self, key: str, devices: list[Any]) -> jax.stages.Compiled | None:
        """Return the executable of a key, loaded onto devices; None without a valid entry."""
        with self._lock:
            expected = self._expected.pop(key, None)
        if expected is not None and not expected.cancel():  # begun
            executable = expected.result()
            if executable is not None:
                return executable
        return self._loaded(key, devices)

    def _loaded(self, key: str, devices: list[Any]) -> jax.stages.Compiled | None:
        contents = self.read(key)
        if contents is None:
            return None
        try:
            serialized, in_tree, out_tree = pickle.loads(contents)
            try:
                register_called(serialized)
            # Without the compiler of an earlier start, or when this process is about to end.
            except (NotImplementedError, RuntimeError) as error:
                _log.info("the executable %s is not used: %s", self._path(key), error)
                return None
            return serialize_executable.deserialize_and_load(
                serialized, in_tree, out_tree, devices[0].client, devices
            )
        except Exception as error:  # XLA and pickle raise many kinds
            self._drop(key, error)
            return None

    def save(self, key: str, compiled: jax.stages.Compiled) -> None:
        """Write an executable; one that cannot be serialised is not kept."""
        if not self._is_usable:
            return
        try:
            contents = pickle.dumps(serialize_executable.serialize(compiled))
        except Exception as error:  # not every executable can be, and XLA raises many kinds
            _log.info("an executable is not kept for later starts: %s", _first_line(error))
            return
        self.write(key, contents)
        with self._lock:
            self._room -= len(contents)
            if self._room > 0:
                return
            self._room = self._max_bytes  # other threads need not look, too
        with suppress(OSError):  # the folder may be gone
            room = self._shrink()
            with self._lock:
                self._room = max(room, self._max_bytes // 16)

    def read(self, key: str) -> bytes | None:
        """Return the contents that were written under a key; None without a valid entry."""
        if not self._is_usable:
            return None
        path = self._path(key)
        try:
            entry = read_own_file(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._drop(key, error)
            return None
        digest, contents = entry[:32], entry[32:]
        if digest != _digest(key, contents):
            self._drop(key, ValueError("its digest is not that of its key and contents"))
            return None
        with suppress(OSError):
            os.utime(path)
        return contents

    def write(self, key: str, contents: bytes) -> None:
        """Write a small entry, for which none is removed; a failure causes a line in the log."""
        if not self._is_usable:
            return
        try:
            handle, scratch = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
            try:
                with open(handle, "wb") as file:
                    file.write(_digest(key, contents))
                    file.write(contents)
                os.replace(scratch, self._path(key))
            finally:
                Path(scratch).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("an executable is not kept for later starts: %s", error)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _drop(self, key: str, error: Exception) -> None:
        _log.warning(
            "the executable %s is compiled again, as its entry cannot be used (%s: %s)",
            self._path(key), type(error).__name__, _first_line(error),
        )  # fmt: skip
        with suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def _shrink(self) -> int:
        """Remove the least recently used entries until all fit; return how many bytes more do."""
        entries = []
        for path in self.folder.iterdir():
            with suppress(OSError):  # another process may remove it
                about = path.stat()
                entries.append((about.st_mtime, about.st_size, path))
        room, num_left = self._max_bytes - sum(size for _, size, _ in entries), len(entries)
        for _, size, path in sorted(entries):
            if room >= 0 and num_left <= _MAX_ENTRIES:
                break
            with suppress(OSError):
                path.unlink()
            room, num_left = room + size, num_left - 1
        return room

    def _is_ours(self) -> bool:
        """Create the folder; return whether only this user can write to it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            about = self.folder.lstat()
        except OSError as error:
            _log.warning("executables are not kept for later starts: %s", error)
            return False
        if not stat.S_ISDIR(about.st_mode) or not is_own(about):
            _log.warning(
                "executables are neither kept nor loaded: %s is not a folder that this user alone "
                "can write to, and executables are code; remove it, or set JAXSERVE_CACHE",
                self.folder,
            )
            return False
        return True


def _digest(key: str, contents: bytes) -> bytes:
    """Return 32 bytes that tell an entry from another one that was copied over it."""
    return hashlib.sha256(key.encode() + b"\n" + contents).digest()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
