"""Compilation of the C++ kernels on first use, and their registration with XLA.

A kernel is compiled once per machine. The library's name in the cache folder is a hash of all
inputs of the compilation. The file ends in a digest of its own bytes, since loading a truncated
library can kill the process; a damaged library is compiled again. The cache folder is the first of
`$PALLAS_KERNELS_CACHE`, `$JAXSERVE_CACHE/kernels` and `~/.cache/jaxserve/kernels` that is set, or a
temporary folder if this one is not writable or other users can write to it. A library that other
users could have written is not loaded, because it is code.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from collections import defaultdict
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

COMPILE_TIMEOUT_S = 120
_INCLUDE = Path(__file__).with_name("include")
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread", "-w")
# For some machines, GCC leaves out fused multiply-adds that would wait for each other. It decides
# for each loop, and one sum is computed by several: the bits of a row must not depend on which.
_GCC_FLAGS = ("--param=avoid-fma-max-bits=0",)
_NATIVE = {"x86_64": "-march=native", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}

_logger = logging.getLogger(__name__)
# Held while a lock is looked up. Each handler has its own lock, so that several compile at once.
_lock = threading.Lock()
_locks: defaultdict[Any, threading.Lock] = defaultdict(threading.Lock)
# (source, symbol, flags) -> the name of its FFI target, or the error that prevents one.
_targets: dict[tuple[Path, str, tuple[str, ...]], str | NotImplementedError] = {}


def cpu_target(source: Path, symbol: str, flags: tuple[str, ...] = ()) -> str:
    """Return the XLA FFI target (platform "cpu") of the handler `symbol` of a C++ file.

    The first call in a process loads the library (and compiles it if the cache lacks it), and
    registers it. Later calls return the same name or raise the same error.

    Args:
      flags: additional compiler flags, such as those of another instruction set.

    Raises:
      NotImplementedError: there is no compiler, it failed, or its library cannot be loaded; the
        reason is also logged as a warning, once for all files that share it.
    """
    key = (source, symbol, flags)
    with _lock:
        own = _locks[key]
    with own:
        if key not in _targets:
            try:
                _targets[key] = _register(*load_symbol(source, symbol, flags), symbol)
                _note(source, flags, None)
            except (NotImplementedError, OSError) as error:
                _warn_once(str(error))
                _note(source, flags, error)
                _targets[key] = NotImplementedError(str(error))
        target = _targets[key]
    if isinstance(target, NotImplementedError):
        raise NotImplementedError(str(target))
    return target


def load_symbol(source: Path, symbol: str, flags: tuple[str, ...] = ()) -> tuple[Path, Any]:
    """Return the library of a C++ file and its function `symbol`.

    A library that does not load is compiled again once. Errors are as in `compile_library`.
    """
    library = compile_library(source, flags)
    try:
        return library, getattr(ctypes.CDLL(str(library)), symbol)
    except (OSError, AttributeError) as error:
        _logger.warning("%s; compiling %s again", error, source.name)
    library = compile_library(source, flags, force=True)
    try:
        # Another spelling of the path: for a known path, the loader returns the library it has.
        return library, getattr(ctypes.CDLL(f"{library.parent}/./{library.name}"), symbol)
    except (OSError, AttributeError) as error:
        raise NotImplementedError(f"{library} cannot be loaded: {error}") from error


def compile_library(source: Path, more_flags: tuple[str, ...] = (), *, force: bool = False) -> Path:
    """Return the compiled library of a C++ file, from the cache folder if it is there and intact.

    Safe for concurrent processes: each compiles into its own file and renames it into place.

    Args:
      more_flags: see `cpu_target`.
      force: compile even if the cache has an intact library.

    Raises:
      NotImplementedError: there is no compiler, or it failed, or exceeded `COMPILE_TIMEOUT_S`.
    """
    compiler = _find_compiler()
    flags, digest = _flags(compiler, more_flags), digest_of(source, more_flags)
    folder = _cache_folder()
    library = folder / f"{source.parent.name}-{source.stem}-{digest}.so"
    if not force and _is_intact(library):
        return library
    handle, scratch = tempfile.mkstemp(dir=folder, prefix=f"{library.stem}-", suffix=".tmp")
    os.close(handle)
    includes = ("-I", jax.ffi.include_dir(), "-I", str(_INCLUDE))
    command = [compiler, *flags, *includes, str(source), "-o", scratch]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
        if done.returncode:
            tail = "\n".join(done.stderr.strip().splitlines()[-20:])
            raise NotImplementedError(f"{compiler} failed with {done.returncode}: {tail}")
        with open(scratch, "r+b") as file:
            file.write(hashlib.sha256(file.read()).digest())
        os.chmod(scratch, 0o700)  # independent of what the compiler made of it under this umask
        os.replace(scratch, library)
    except subprocess.TimeoutExpired as error:
        raise NotImplementedError(f"{compiler} took longer than {COMPILE_TIMEOUT_S} s") from error
    finally:
        Path(scratch).unlink(missing_ok=True)
    return library


def target_name(source: Path, symbol: str, flags: tuple[str, ...] = ()) -> str:
    """Return the name that `cpu_target` gives the handler, without compiling anything.

    The name contains a digest, so that an executable of another process cannot call another version
    of the handler than the one that it was compiled for.

    Raises:
      NotImplementedError: there is no compiler, or the handler could not be used last time.
    """
    digest = digest_of(source, flags)
    if _failure(digest).exists():
        raise NotImplementedError(f"{source.name} could not be used")
    return f"pallas_kernels.{symbol}.{digest}"


def digest_of(source: Path, more_flags: tuple[str, ...] = ()) -> str:
    """Return a digest of the compilation's inputs; NotImplementedError without a compiler."""
    compiler = _find_compiler()
    changed_ns = os.stat(source).st_mtime_ns, os.stat(compiler).st_mtime_ns
    return _digest(source, compiler, more_flags, changed_ns)


@functools.cache
def _digest(
    source: Path, compiler: str, more_flags: tuple[str, ...], changed_ns: tuple[int, int]
) -> str:
    del changed_ns  # a key of the cache
    inputs = (
        *(path.read_text() for path in (source, *sorted(_INCLUDE.glob("*.h")))),
        *(compiler, _description(compiler), *_flags(compiler, more_flags)),
        *(version("jaxlib"), cpu_model()),
    )
    return hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]


def _flags(compiler: str, more: tuple[str, ...]) -> tuple[str, ...]:
    native = _NATIVE.get(platform.machine())
    own = _GCC_FLAGS if "Free Software Foundation" in _description(compiler) else ()
    return (*_FLAGS, *own, *((native,) if native else ()), *more)


def _description(compiler: str) -> str:
    return _compiler_version(compiler, os.stat(compiler).st_mtime_ns)


def _failure(digest: str) -> Path:
    """Return the file that records why a library cannot be used; it is removed once it can be."""
    return _cache_folder() / f"{digest}.failed"


def _note(source: Path, flags: tuple[str, ...], error: Exception | None) -> None:
    with suppress(NotImplementedError, OSError):  # no compiler, which each process sees for itself
        path = _failure(digest_of(source, flags))
        if error is not None:
            path.write_text(str(error))
        elif path.exists():
            path.unlink()


def _register(library: Path, handler: Any, symbol: str) -> str:
    target = f"pallas_kernels.{symbol}.{library.stem.rsplit('-', 1)[1]}"
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu", api_version=1)
    return target


def _is_intact(library: Path) -> bool:
    """Return whether the file exists and ends in the digest of its other bytes."""
    try:
        content = read_own_file(library)
    except FileNotFoundError:
        return False
    except OSError as error:
        _logger.warning("compiling %s again: %s", library.name, error)
        return False
    return content[-32:] == hashlib.sha256(content[:-32]).digest()


@functools.cache
def _compiler_version(compiler: str, changed_ns: int) -> str:
    """Return the compiler's version text; `changed_ns` detects an upgrade at the same path."""
    del changed_ns  # a key of the cache
    try:
        done = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotImplementedError(f"{compiler} does not run: {error}") from error
    return done.stdout


def has_compiler() -> bool:
    """Return whether this machine has a C++ compiler, which the C++ kernels need."""
    try:
        _find_compiler()
    except NotImplementedError:
        return False
    return True


def _find_compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise NotImplementedError(
        "no C++ compiler: none of $CXX, c++, g++ and clang++ is on the path; install one "
        "(GCC 12 or newer, or clang)"
    )


def _cache_folder() -> Path:
    if given := os.environ.get("PALLAS_KERNELS_CACHE"):
        folder = Path(given)
    elif given := os.environ.get("JAXSERVE_CACHE"):
        folder = Path(given) / "kernels"
    else:
        folder = Path.home() / ".cache" / "jaxserve" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_own(folder.stat()):
            raise PermissionError(
                f"{folder} is not a folder that this user alone can write to, and kernels are "
                "code; run chmod go-w on it if it is yours"
            )
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        return _temporary_folder(str(error))


@functools.cache
def _temporary_folder(reason: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="pallas_kernels-"))
    _logger.warning(
        "kernels for CPUs are compiled again at every start, into %s: %s", folder, reason
    )
    return folder


@functools.cache
def _warn_once(reason: str) -> None:
    _logger.warning("XLA computes instead of C++ kernels, several times slower: %s", reason)


def multiplies_bfloat16() -> bool:
    """Return whether C++ kernels have instructions here that multiply bfloat16 numbers."""
    return has_compiler() and "avx512_bf16" in cpu_model().split()


def cpu_model() -> str:
    """Return what `-march=native` depends on, because machines may share a cache folder."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "CPU part", "Features")
    lines = (line for line in text.splitlines() if line.startswith(wanted))
    return "\n".join(sorted(set(lines)))


def is_own(about: os.stat_result) -> bool:
    """Return whether a file or folder is this user's, and only this user can write to it."""
    others = stat.S_IWGRP | stat.S_IWOTH
    return about.st_uid == os.getuid() and not about.st_mode & others


def read_own_file(path: Path) -> bytes:
    """Return the contents of a file that only this user can write to.

    Raise PermissionError if another user owns it or can write to it, or if it is a link.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with open(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or not is_own(about):
            raise PermissionError(
                f"{path} is not a file that this user alone can write to, and it holds code"
            )
        return file.read()
