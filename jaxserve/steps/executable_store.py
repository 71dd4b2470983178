"""Compiled executables on disk, so that a later process loads them without tracing.

An executable is native code, and its entry is unpickled. Therefore only this user can write to the
store's folder and its entries.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import logging
import os
import pickle
import platform
import stat
import sys
import tempfile
import threading
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, final

import jax
import numpy as np
from flax import nnx
from jax.experimental import serialize_executable

from jaxserve.kernels.build import cpu_model, is_own, read_own_file
from jaxserve.kernels.cpu_targets import register_called

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

MAX_BYTES = 2 << 30
# Some entries only name an executable, in a few hundred bytes.
_MAX_ENTRIES = 20_000
_SUFFIX = ".compiled"
# Executables that a start uses before it counts as begun.
_MAX_FIRST = 12


@final
class ExecutableStore:
    """A folder of executables by key; the least recently used entries are evicted.

    A key must name everything that decides the program, see `key_of`. Several processes may use a
    folder at once: an entry is written to a temporary name and renamed. It starts with a digest of
    its key and contents. An entry that cannot be loaded is a miss, is removed, and is logged once;
    it stays if it calls a kernel that this process cannot compile, or if the process is about to
    end. If the folder cannot be used, the store is empty and saves nothing.

    Args:
      folder: created if it does not exist, for this user alone.
      max_bytes: size of all entries together; a process may exceed it by a sixteenth before it
        scans the folder again.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES):
        self.folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # Bytes that this process may save before it scans the folder again.
        self._room = 0
        self._has_warned = False
        self._is_usable = self._is_ours()
        self._expected: dict[str, Future[jax.stages.Compiled | None]] = {}
        # The key under which the keys of the first used executables are written.
        self._first_key: str | None = None
        self._keys_before: set[str] = set()
        self._first: list[str] = []
        self._first_before: list[str] = []
        self._knows_first = False

    def expect(self, key: str) -> bool:
        """Expect the executables that an earlier process used first after the same call.

        `load_expected` loads them in the background. The executables that this process uses first
        are written for the next one. A wrong expectation costs time only. Returns whether
        `load_expected` has anything to do: not for a key that was expected before.
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
        """Return whether a record of the first used executables exists; False after `end_start`."""
        return self._knows_first

    def end_start(self) -> None:
        """Drop the executables that were expected and not used; the start is over."""
        with self._lock:
            expected, self._expected = self._expected, {}
            self._knows_first = False
        for future in expected.values():
            future.cancel()

    def load_expected(self, devices: list[Any]) -> None:
        """Load the expected executables that are not loaded yet; call it on a thread of its own."""
        for key, future in list(self._expected.items()):
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._loaded(key, devices))
                except BaseException as error:
                    future.set_exception(error)

    def note_use(self, key: str) -> None:
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
            # The compiler of an earlier start is missing, or this process is about to end.
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
        """Write an executable; one that cannot be serialised is skipped."""
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
            self._room = self._max_bytes  # other threads need not scan it too
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
        """Write a small entry, for which none is evicted; a failure is logged."""
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
            self._warn_not_kept(error)

    def remembered(self, key: str, make: Callable[[], _T]) -> _T:
        """Return what an earlier process made for a key, or make it and write it, pickled."""
        contents = self.read(key)
        if contents is not None:
            try:
                return pickle.loads(contents)
            except Exception as error:  # pickle raises many kinds
                self._drop(key, error)
        made = make()
        self.write(key, pickle.dumps(made))
        return made

    def _warn_not_kept(self, error: OSError) -> None:
        """Say once what a folder that cannot be written to, or a full disk, costs."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "executables are not kept, so that every start compiles them again (%s); make room "
                "or the folder writable, or set JAXSERVE_CACHE to another folder",
                error,
            )

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _drop(self, key: str, error: Exception) -> None:
        _log.warning(
            "the executable %s is compiled again, as its entry cannot be used (%s: %s)",
            self._path(key),
            type(error).__name__,
            _first_line(error),
        )
        with suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def _shrink(self) -> int:
        """Evict the least recently used entries until all fit; return how many more bytes fit."""
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
            self._warn_not_kept(error)
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
    """Return 32 bytes that tell an entry from a copy of another entry."""
    return hashlib.sha256(key.encode() + b"\n" + contents).digest()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


# The package whose sources, and others whose versions, are part of every key; only their classes
# and functions have names.
_OURS = "jaxserve"
_VERSIONED = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
_BUILTIN = ("builtins", "collections", "functools", "jaxtyping")
# Plug-ins of GPUs, and the libraries whose compilers and algorithms they choose when they compile.
_GPU_PACKAGES = (
    *("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    *("nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc", "nvidia-cublas-cu12", "nvidia-cublas"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-nvvm", "nvidia-nvjitlink"),
    "nvidia-nvjitlink-cu12",
)
# Environment variables with flags of compilers, and another one that decides their products.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_TF32 = "NVIDIA_TF32_OVERRIDE"
# Prefixes of flags that do not affect what is compiled: dumps, and folders of tools and caches.
_IGNORED_FLAGS = (
    *("--xla_dump_", "--xla_gpu_cuda_data_dir", "--xla_gpu_per_fusion_autotune_cache_dir"),
    "--xla_gpu_experimental_autotune_cache_mode",
)
# Prefixes of `jax.config` values about reports, caches and the choice of devices, which do not
# affect what is compiled: the devices themselves are described.
_IGNORED_SETTINGS = (
    *("jax_compilation_cache", "jax_persistent_cache", "jax_log", "jax_debug_log", "jax_dump_ir"),
    *("jax_platforms", "jax_platform_name", "jax_cuda_visible", "jax_rocm_visible"),
)
_IGNORED_FILES = ("__pycache__",)


class Unnameable(Exception):
    """A part has no name that is equal in every process."""


def key_of(*parts: Any) -> str:
    """Return a key, equal in every process for equal parts only, or raise `Unnameable`."""
    return _digest_of(_tokens(parts, {}))[:40]


def _digest_of(tokens: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(tokens).encode()).hexdigest()


@functools.cache
def our_sources() -> str:
    """Return a digest of our package's sources when this module was imported.

    Later edits are not in the modules that this process runs.
    """
    return hashlib.sha256("\n".join(_sources(_OURS)).encode()).hexdigest()


@functools.cache
def this_installation() -> str:
    """Return a digest of Python, of installed versions, and of flags in the environment."""
    lines = [platform.python_version(), platform.machine()]
    lines += [*installed_versions(), *compiler_flags(os.environ)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def installed_versions() -> list[str]:
    """Return name and version of each installed package that decides what is compiled."""
    lines = [f"{name} {_version(name)}" for name in _VERSIONED]
    for name in _GPU_PACKAGES:
        with suppress(PackageNotFoundError):
            lines.append(f"{name} {version(name)}")
    return lines


def compiler_flags(environ: Mapping[str, str]) -> list[str]:
    """Return the flags of an environment that decide what is compiled.

    A flag that is given again replaces the first one, so their order is kept. Devices and memory
    that an environment chooses are no flags: replicas on equal devices share executables.
    """
    flags = [flag for name in _FLAGS for flag in _flags_in(environ.get(name, ""))]
    flags = [flag for flag in flags if not flag.startswith(_IGNORED_FLAGS)]
    return [*flags, f"{_TF32}={environ.get(_TF32)}"]


def _flags_in(text: str) -> list[str]:
    """Return the flags in a variable's text, or in the file that it names instead, as XLA does."""
    if text.strip() and not text.strip().startswith("-"):
        with suppress(OSError, UnicodeDecodeError):
            text = Path(text).read_text()
    return text.split()


def these_settings() -> str:
    """Return JAX's settings that may decide what is traced and compiled."""
    values = jax.config.values.items()
    return repr(sorted((k, repr(v)) for k, v in values if not k.startswith(_IGNORED_SETTINGS)))


def describe_devices(devices: list[Any]) -> tuple[Any, ...]:
    """Return the properties of devices that an executable depends on."""
    client = devices[0].client
    return (
        *(client.platform, client.platform_version, jax.process_count()),
        *([cpu_model()] if client.platform == "cpu" else []),
        # An executable names its devices by id, and is loaded onto no others.
        tuple(
            (each.id, each.device_kind, str(getattr(each, "compute_capability", None)))
            for each in devices
        ),
    )


# A dataclass by its id, and the digest of its tokens: the layers of a model share large ones.
_Seen = dict[int, tuple[Any, str]]
_PLAIN = (bool, int, float, complex, str, bytes)


def _tokens(value: Any, seen: _Seen) -> list[str]:
    if value is None or isinstance(value, _PLAIN):
        return [f"{type(value).__name__}:{value!r}"]
    if isinstance(value, (tuple, list)):
        found = [f"{_global(type(value))}{len(value)}"]
        for item in value:
            found += _tokens(item, seen)
        return found
    if isinstance(value, enum.Enum):
        return [_global(type(value)), value.name]
    if isinstance(value, (np.dtype, jax.tree_util.PyTreeDef)):
        return [str(value)]
    if isinstance(value, jax.ShapeDtypeStruct):
        about = f"{value.shape}{value.dtype}{value.weak_type}"
        return [about, *_tokens(value.sharding, seen)]
    if isinstance(value, jax.sharding.Sharding):
        # Devices are described separately.
        return [f"{value} {value.memory_kind}"]
    if isinstance(value, (np.ndarray, np.generic)):
        return [f"{value.shape}{value.dtype}{np.asarray(value).tobytes().hex()}"]
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return [_global(value)]
    if isinstance(value, functools.partial):
        return ["partial", *_tokens((value.func, value.args, value.keywords), seen)]
    if isinstance(value, Mapping):
        # Flax copies the metadata of a variable in an order that differs between processes.
        items = sorted("\1".join(_tokens(item, seen)) for item in value.items())
        return [f"{{{len(value)}", *items]
    if isinstance(value, (set, frozenset)):
        return [f"set{len(value)}", *sorted("\1".join(_tokens(item, seen)) for item in value)]
    if dataclasses.is_dataclass(value) or isinstance(value, nnx.GraphDef):
        if id(value) not in seen:
            found = [_global(type(value))]
            for field in dataclasses.fields(value):
                found += (field.name, *_tokens(getattr(value, field.name), seen))
            seen[id(value)] = value, _digest_of(found)
        return [seen[id(value)][1]]
    if callable(value) and hasattr(value, "__wrapped__"):  # a jitted function of JAX's own
        return ["wrapped", *_tokens(value.__wrapped__, seen)]
    raise Unnameable(f"{type(value).__module__}.{type(value).__qualname__}")


def _global(thing: Any) -> str:
    """Return the name of a class or function in a module of ours, JAX or Flax."""
    module, name = thing.__module__ or "builtins", thing.__qualname__
    package = module.partition(".")[0]
    if package not in (_OURS, *_VERSIONED, *_BUILTIN) or "<" in name:
        raise Unnameable(f"{module}.{name}")
    return f"{module}.{name}"


def _sources(package: str) -> list[str]:
    """Return a line for every file of a package: its name and a digest of its contents."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the package {package} has no folder")
    root = spec.submodule_search_locations[0]
    lines = []
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if name not in _IGNORED_FILES)
        for name in sorted(names):
            path = os.path.join(folder, name)  # every start reads all: a `Path` takes longer
            with open(path, "rb") as file:
                digest = hashlib.sha256(file.read()).hexdigest()
            lines.append(f"{package}{path.removeprefix(root)} {digest}")
    return lines


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return sys.modules[name].__version__


our_sources()


# JAX caches compilations that take this long: none.
_NEVER_S = 1e9
_LEAST = "jax_persistent_cache_min_compile_time_secs"

_lock = threading.Lock()
# The number of running blocks, and the setting that the last of them restores.
_running = 0
_before_s = 0.0


@contextmanager
def without_jax_cache(platform: str) -> Iterator[dict[str, Any] | None]:
    """Keep the block's executables out of JAX's cache on a CPU; yield options of the compilation.

    On a CPU an executable from that cache lacks its functions when it is serialised again: it
    loads, and fails when it is called (jaxlib 0.10). So it must not be read, and an entry that
    nothing reads would only fill the disk. The option belongs to GPUs, and has no effect here
    except that it is part of the cache's key. The setting is the process's: other threads'
    compilations are not cached meanwhile either.
    """
    if platform != "cpu":
        yield None
        return
    _begin()
    try:
        yield {"xla_gpu_algorithm_denylist_path": f"not-cached-{uuid.uuid4()}"}
    finally:
        _end()


def _begin() -> None:
    global _running, _before_s
    with _lock:
        if _running == 0:
            _before_s = jax.config.values[_LEAST]
            jax.config.update(_LEAST, _NEVER_S)
        _running += 1


def _end() -> None:
    global _running
    with _lock:
        _running -= 1
        if _running == 0:
            jax.config.update(_LEAST, _before_s)
