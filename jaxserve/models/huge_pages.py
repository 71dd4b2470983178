"""Memory in huge pages for weights on a CPU.

A step reads every weight from memory. With pages of 4 KiB, address translation takes a part of
that time, and the processor's prefetcher stops at the end of each page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import jax
import numpy as np

from jaxserve.core.host import available_host_bytes

_PAGE = 2 << 20
# Arrays share mappings of this size, which are freed when all of a mapping's arrays are gone.
_MAPPING = 32 * _PAGE
_SMALL = 1 << 18  # bytes; smaller arrays stay where they are
_ALIGNMENT = 64  # of arrays that JAX uses without a copy
# Seconds until the memory from `read` is moved to huge pages: the start has ended by then.
_MOVED_AFTER_S = 4.0
# Moving yields to the threads that serve: it takes seconds of a core's time.
_NICENESS = 5
_MADV_COLLAPSE = 25  # of Linux 6.1 and newer; Python has no name for it
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@final
class HugePages:
    """An allocator of consecutive arrays in huge pages.

    With `later`, memory is in small pages until `move`: new huge pages may take a second to get.
    """

    def __init__(self, *, later: bool = False) -> None:
        self._later = later
        self._mappings: list[weakref.ref[mmap.mmap]] = []
        self._rest = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array whose contents are undefined."""
        size = int(np.prod(shape)) * dtype.itemsize
        taken = -(-size // _ALIGNMENT) * _ALIGNMENT
        if taken > self._rest.size:
            self._rest = self._mapped(max(-(-taken // _PAGE) * _PAGE, _MAPPING))
        own, self._rest = self._rest[:size], self._rest[taken:]
        return own.view(dtype).reshape(shape)

    def copied(self, array: jax.Array) -> jax.Array:
        """Return a copy in huge pages of an array on one CPU, and any other array unchanged."""
        devices = array.devices()
        if len(devices) != 1 or next(iter(devices)).platform != "cpu" or not is_useful(array):
            return array
        own = self.empty(array.shape, np.dtype(array.dtype))
        np.copyto(own, np.asarray(array))
        return jax.device_put(own, array.sharding)

    def move(self) -> None:
        """Move memory in use to huge pages, in place; it may be read meanwhile.

        Before Linux 6.1 the kernel does it on its own, in minutes.
        """
        # Unlike `mmap.madvise`, this call lets other Python threads run.
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for mapping in self._mappings:
            if (memory := mapping()) is None:
                continue
            memory.madvise(mmap.MADV_HUGEPAGE)
            begin = np.frombuffer(memory, np.uint8).ctypes.data
            for page in range(begin + -begin % _PAGE, begin + len(memory) - _PAGE + 1, _PAGE):
                advise(page, _PAGE, _MADV_COLLAPSE)  # refused for pages without contents

    def _mapped(self, size: int) -> np.ndarray:
        """Return memory of `size` bytes that begins at a huge page."""
        memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if not self._later:
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._mappings.append(weakref.ref(memory))
        whole = np.frombuffer(memory, np.uint8)
        first = -whole.ctypes.data % _PAGE
        return whole[first : first + size]


def is_useful(array: Any) -> bool:
    """Return whether the array is large enough, and the operating system has huge pages."""
    return array.nbytes >= _SMALL and are_available()


def are_available() -> bool:
    """Return whether the operating system gives huge pages on request."""
    try:
        return sys.platform == "linux" and "[never]" not in _SETTING.read_text()
    except OSError:
        return False


def read(files: Sequence[np.memmap]) -> list[np.ndarray]:
    """Return the contents of mapped files in memory, and small files as they are mapped.

    If they would take more than half of the free memory, all stay mapped. Some seconds later, a
    thread moves that memory to huge pages. The maps are not touched, so that their pages do not
    count as this process's memory.
    """
    useful = [file for file in files if is_useful(file)]
    if not useful or sum(file.nbytes for file in useful) > available_host_bytes() // 2:
        return list(files)
    memory = HugePages(later=True)
    arrays = [memory.empty(f.shape, f.dtype) if is_useful(f) else f for f in files]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        list(threads.map(_fill, arrays, files))
    mover = threading.Timer(_MOVED_AFTER_S, _move_nicely, [memory])
    mover.daemon = True
    mover.start()
    return arrays


def _move_nicely(memory: HugePages) -> None:
    with suppress(OSError):  # on Linux this is the niceness of the thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    memory.move()


def _fill(array: np.ndarray, mapped: np.memmap) -> None:
    if array is mapped:
        return
    assert mapped.filename is not None
    with open(mapped.filename, "rb", buffering=0) as file:
        file.seek(mapped.offset)
        rest = array.reshape(-1).view(np.uint8).data
        while rest:
            done = file.readinto(rest)
            if not done:
                raise ValueError(f"{mapped.filename} is cut off")
            rest = rest[done:]
