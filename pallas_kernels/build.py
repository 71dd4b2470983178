"""Compiling the C++ kernels on first use, and registering them with XLA.

A kernel is compiled once a machine: the library's name in the cache folder is a hash of everything
that went into it. Folder: `$PALLAS_KERNELS_CACHE`, else `$JAXSERVE_CACHE/kernels`, else
`~/.cache/jaxserve/kernels`; a temporary one where that cannot be written.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from importlib.metadata import version
from pathlib import Path

import jax

COMPILE_TIMEOUT_S = 120
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread", "-w")
_NATIVE = {"x86_64": "-march=native", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}

_logger = logging.getLogger(__name__)
_lock = threading.Lock()
# What became of each (source, symbol): the name of its FFI target, or why there is none.
_targets: dict[tuple[Path, str], str | NotImplementedError] = {}


def cpu_target(source: Path, symbol: str) -> str:
    """The XLA FFI target (platform "cpu") that serves the handler `symbol` of a C++ file.

    The first call of a process loads the library, compiling it if no earlier process did, and
    registers it; later calls return the same name, or raise the same error.

    Raises:
      NotImplementedError: there is no compiler, or it failed; also logged as a warning, once.
    """
    with _lock:
        key = (source, symbol)
        if key not in _targets:
            try:
                _targets[key] = _register(compile_library(source), symbol)
            except (NotImplementedError, OSError) as error:
                _logger.warning("%s cannot be used: %s", source.name, error)
                _targets[key] = NotImplementedError(str(error))
        target = _targets[key]
    if isinstance(target, NotImplementedError):
        raise NotImplementedError(str(target))
    return target


def compile_library(source: Path) -> Path:
    """The compiled library of a C++ file, from the cache folder if it is there.

    Processes may race: each compiles into a file of its own and renames it into place.

    Raises:
      NotImplementedError: there is no compiler, it failed, or it took over `COMPILE_TIMEOUT_S`.
    """
    compiler = _find_compiler()
    native = _NATIVE.get(platform.machine())
    flags = (*_FLAGS, *((native,) if native else ()))
    made_of = (source.read_text(), compiler, *flags, version("jaxlib"), _cpu_model())
    digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    folder = _cache_folder()
    library = folder / f"{source.parent.name}-{source.stem}-{digest}.so"
    if library.exists():
        return library
    handle, scratch = tempfile.mkstemp(dir=folder, prefix=f"{library.stem}-", suffix=".tmp")
    os.close(handle)
    command = [compiler, *flags, "-I", jax.ffi.include_dir(), str(source), "-o", scratch]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
        if done.returncode:
            said = "\n".join(done.stderr.strip().splitlines()[-20:])
            raise NotImplementedError(f"{compiler} failed with {done.returncode}: {said}")
        os.replace(scratch, library)
    except subprocess.TimeoutExpired as error:
        raise NotImplementedError(f"{compiler} took over {COMPILE_TIMEOUT_S} s") from error
    finally:
        Path(scratch).unlink(missing_ok=True)
    return library


def _register(library: Path, symbol: str) -> str:
    handler = getattr(ctypes.CDLL(str(library)), symbol)
    # The hash in the name keeps an executable of XLA's persistent cache from calling another
    # version of the handler than the one it was compiled for.
    target = f"pallas_kernels.{symbol}.{library.stem.rsplit('-', 1)[1]}"
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu", api_version=1)
    return target


def _find_compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise NotImplementedError(
        "no C++ compiler: none of $CXX, c++, g++ and clang++ is on the path; install one"
    )


def _cache_folder() -> Path:
    if given := os.environ.get("PALLAS_KERNELS_CACHE"):
        folder = Path(given)
    elif given := os.environ.get("JAXSERVE_CACHE"):
        folder = Path(given) / "kernels"
    else:
        folder = Path.home() / ".cache" / "jaxserve" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        temporary = Path(tempfile.mkdtemp(prefix="pallas_kernels-"))
        _logger.warning("%s; compiled kernels go to %s for this process", error, temporary)
        return temporary


def _cpu_model() -> str:
    """What `-march=native` depends on: a folder may be shared between machines."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "CPU part", "Features")
    lines = (line for line in text.splitlines() if line.startswith(wanted))
    return "\n".join(sorted(set(lines)))
